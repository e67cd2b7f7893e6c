"""Named tuples whose fields are tiles, vectors and numbers are values: made in a kernel, carried by its loops, passed to
`@inlined` functions and returned. Numba knows their fields; what it lacks is taught here.

    class Softmax(NamedTuple):
        o: Any
        m: Any

        @inlined
        def absorb(self, s): ...               # called as a method: state = state.absorb(s)

    state = state._replace(m=m)                # the same but for some fields
"""

import inspect

from numba.cuda import types
from numba.cuda.cudaimpl import registry
from numba.cuda.extending import infer_getattr, register_model
from numba.cuda.typing import signature
from numba.cuda.typing.templates import AbstractTemplate, AttributeTemplate

from .numba_members import Method, method_of
from .numba_types import kernel_line


def _same_class(this, other):
    """Are these two of the same class?"""
    return isinstance(other, types.BaseNamedTuple) and other.instance_class is this.instance_class


def _unify(this, context, other):
    """What a loop carries, or both ends of an `if` give: field by field. Numba does so for plain tuples only."""
    fields = [context.unify_pairs(a, b) for a, b in zip(this, other)] if _same_class(this, other) else [None]
    return None if None in fields else types.BaseTuple.from_types(fields, this.instance_class)


def _can_convert_to(this, context, other):
    kinds = [context.can_convert(a, b) for a, b in zip(this, other)] if _same_class(this, other) else [None]
    return None if None in kinds else max(kinds)


for _t in (types.NamedTuple, types.NamedUniTuple):
    _t.unify, _t.can_convert_to = _unify, _can_convert_to


def _convert(context, builder, have, want, value):
    fields = [context.cast(builder, builder.extract_value(value, i), a, b) for i, (a, b) in enumerate(zip(have, want))]
    return context.make_tuple(builder, want, fields)


registry.lower_cast(types.BaseNamedTuple, types.BaseNamedTuple)(_convert)


class Replace(types.BoundFunction):
    """`this._replace(field=value, ...)`"""

    def __init__(self, this):
        self.this = this
        self.template = type("Template", (AbstractTemplate,), {"key": Replace, "this": this})  # Numba reads them
        types.Callable.__init__(self, f"_replace of {this}")

    @property
    def key(self):
        return self.this

    def get_call_type(self, context, args, kws):
        kws, fields = dict(kws), self.this.fields
        if args or not kws.keys() <= set(fields):
            wrong = ", ".join(sorted(kws.keys() - set(fields))) or "arguments without names"
            raise TypeError(f"_replace takes fields of {self.this.instance_class.__name__}, got {wrong}{kernel_line()}")
        items = [types.unliteral(kws.get(name, old)) for name, old in zip(fields, self.this)]
        result = types.BaseTuple.from_types(items, self.this.instance_class)
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None) for name in fields]
        replaced = [kws.get(name, types.Omitted(None)) for name in fields]
        return signature(result, *replaced, recvr=self.this).replace(pysig=inspect.Signature(parameters))

    def get_call_signatures(self):
        return (), True

    def get_impl_key(self, sig):
        return Replace


register_model(Replace)(lambda manager, ty: manager[ty.this])


@registry.lower(Replace, types.BaseNamedTuple, types.VarArg(types.Any))
def _replace(context, builder, sig, values):
    old, *replaced = values
    fields = []
    for i, (have, want, value) in enumerate(zip(sig.args[1:], sig.return_type, replaced)):
        is_omitted = isinstance(have, types.Omitted)
        fields.append(builder.extract_value(old, i) if is_omitted else context.cast(builder, value, have, want))
    return context.make_tuple(builder, sig.return_type, fields)


@infer_getattr
class _Methods(AttributeTemplate):
    key = types.BaseNamedTuple

    def generic_resolve(self, this, name):
        if name == "_replace":
            return Replace(this)
        method = method_of(this.instance_class, name)
        return method and Method(method, this)
