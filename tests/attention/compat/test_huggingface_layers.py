"""compat/huggingface_layers: small hybrid models of transformers whose recurrent layers are attention.nn's, compared with
transformers' own in float32. Skipped without torch or transformers."""

import contextlib

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers_models import NEW, PROMPT, check_close, check_norm, models, prompts, recurrent_layers, step  # noqa: E402

from attention import nn  # noqa: E402
from attention.compat import huggingface  # noqa: E402

KINDS = {"qwen3_next": nn.GatedDeltaNet, "kimi_linear": nn.KimiDeltaAttention, "bamba": nn.Mamba2}


def replaced(name):
    """(ours in bfloat16, eager in bfloat16, eager in float32, the layers that were replaced)."""
    ours, *others = models(name)
    layers = [x for x in huggingface.replace_layers(ours).modules() if hasattr(x, "original")]
    assert [type(x.layer) for x in layers] == [KINDS[name]]
    return ours, *others, layers


def test_generates_as_eager():
    """A prompt that begins with padding, and tokens one by one, with the cache of transformers."""
    ours, low, exact, _ = replaced("bamba")
    ids, mask = prompts()
    options = dict(max_new_tokens=NEW, do_sample=False, output_logits=True, return_dict_in_generate=True)
    result = ours.generate(ids, attention_mask=mask, disable_compile=True, **options)
    mask = torch.cat([mask, mask.new_ones(2, NEW)], 1)[:, :-1]
    with torch.no_grad():
        theirs = [m(result.sequences[:, :-1], attention_mask=mask, use_cache=False).logits[:, -NEW:] for m in (low, exact)]
    check_close(torch.stack(result.logits, 1), *theirs)


@pytest.mark.parametrize("name", KINDS)
def test_trains_as_eager_and_is_saved_as_transformers_is(name, tmp_path):
    """A step on sequences with padding, compiled in one case; its gradients, as weights, are saved by transformers' names."""
    ours, low, exact, _ = replaced(name)
    if name == "bamba":
        ours.forward = torch.compile(ours.forward, fullgraph=True, backend="aot_eager")
    losses, grads = zip(*(step(model, *prompts()) for model in (ours, low, exact)))
    vars(ours).pop("forward", None)
    check_close(*losses[:2], losses[2] + torch.tensor([0.0, 1.0]))
    with torch.no_grad():
        for key, parameter in ours.named_parameters():
            parameter.copy_(grads[0].get(key, torch.zeros_like(parameter)))
    huggingface.restore_layers(ours).save_pretrained(tmp_path)
    saved = type(ours).from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert saved.keys() == exact.state_dict().keys()
    for key, gradient in grads[2].items():
        check_norm(saved[key], grads[1][key], gradient, key, factor=3, slack=0.05)


def test_a_cache_in_training():
    """It is filled, and a warning says what it costs; the next token is that of the whole sequence."""
    ours, low, exact, (layer,) = replaced("bamba")
    ids, last = prompts(padded=False)[0][:1], dict(position_ids=torch.tensor([[PROMPT - 1]]))
    with pytest.warns(UserWarning, match="^use_cache=False, or model.config.use_cache = False, makes training faster"):
        first = ours(ids[:, :-1], labels=ids[:, :-1])
    first.loss.backward()
    assert layer.layer.A_log.grad is not None
    with torch.no_grad():
        token = ours(ids[:, -1:], cache=first.cache, **last).logits
        check_close(token, low(ids[:, -1:], cache=low(ids[:, :-1]).cache, **last).logits, exact(ids).logits[:, -1:])


def test_documents_are_apart():
    """Packed by seq_idx, in two batches, and by cu_seq_lens_q."""
    _, _, _, (layer,) = replaced("qwen3_next")
    x = torch.randn(2, 12, 32, dtype=torch.bfloat16)
    with torch.no_grad():
        alone = torch.cat([layer(x[:, :5]), layer(x[:, 5:])], 1)
        by_index = layer(x, seq_idx=torch.tensor([[0] * 5 + [1] * 7] * 2))
        by_ends = layer(x[:1], cu_seq_lens_q=torch.tensor([0, 5, 12]))
    torch.testing.assert_close(by_index, alone)
    torch.testing.assert_close(by_ends, alone[:1])


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")
@pytest.mark.parametrize("what", ["functions", "layers"])
def test_a_sharded_step(what):
    """Under FSDP2, autocast and checkpointing of layers the loss and the gradients of a step are those of a plain step."""
    from torch.distributed.fsdp import fully_shard

    model, ids, results = models("kimi_linear")[0].float(), prompts()[0][:, :9], []
    if what == "layers":
        huggingface.replace_layers(model)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for sharded in False, True:
            if sharded:
                model.gradient_checkpointing_enable()
                mesh = torch.distributed.init_device_mesh("cpu", (1,))
                for layer in model.model.layers:
                    fully_shard(layer, mesh=mesh)
                fully_shard(model, mesh=mesh)
            functions = recurrent_layers(model, "kimi_linear") if what == "functions" else contextlib.nullcontext()
            with functions, torch.autocast("cpu", torch.bfloat16):
                loss, grads = step(model, ids, torch.ones_like(ids))
            grads = {key: x.full_tensor() if hasattr(x, "full_tensor") else x.clone() for key, x in grads.items()}
            results.append((loss, grads))
    finally:
        torch.distributed.destroy_process_group()
    (plain, plain_grads), (loss, grads) = results
    torch.testing.assert_close(loss, plain)
    assert grads.keys() == plain_grads.keys()
    for key, x in plain_grads.items():
        assert (grads[key] - x).norm() <= 0.05 * x.norm(), key


def test_models_without_recurrent_layers():
    with pytest.raises(ValueError, match=r"^model: has no recurrent layers that attention.nn has: LlamaForCausalLM"):
        huggingface.replace_layers(models("llama")[0])
