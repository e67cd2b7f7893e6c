"""bench/search_backward.py: what is in use is among what the search finds."""

from attention.kernels.softmax import backward_hopper, backward_narrow_hopper
from bench import search_backward as search
from tiles.targets import LARGE


def test_what_is_in_use_fits():
    actual = search.candidates(64)
    assert [config for module, config in actual if search.in_use(module, config)] == [
        backward_narrow_hopper.config_for(64, *search.PLAIN)
    ]
    for module, config in actual:
        assert search.registers(module, config) < backward_hopper.REGISTERS[1]
        assert search.shared_bytes(module, config) <= LARGE


def test_a_configuration_is_forced_for_a_while():
    module, config = search.candidates(64)[0]
    before = module.config_for
    with search.forced(module, config):
        assert module.config_for(64, *search.PLAIN) == config
    assert module.config_for is before
