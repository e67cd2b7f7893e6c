"""What kernels find behind a dot: the attributes, ops and `@inlined` methods of tile values and static objects."""

import dataclasses
import inspect

from numba.cuda import types
from numba.cuda.cudaimpl import registry
from numba.cuda.extending import infer_getattr, register_model
from numba.cuda.typing.templates import AbstractTemplate, AttributeTemplate

from ..op import OPS
from ..types import gl, is_static, pending, rt, rv, st, sv
from .numba_helpers import BOUND, inline
from .numba_types import StaticType, Value, kernel_line, member


def plain_function(name):
    """The error message for a plain function that a kernel calls."""
    return f"{name} is a plain Python function, which a kernel cannot call: decorate it with @tiles.inlined"


def method_of(cls, name):
    """The @inlined method of that name, if the class has one. TypeError: it is a plain one."""
    method = inspect.getattr_static(cls, name, None)
    if inspect.isfunction(method) and not hasattr(method, "dispatcher"):
        raise TypeError(f"{plain_function(method.__qualname__.rpartition('<locals>.')[2])}{kernel_line()}")
    return method if inspect.isfunction(method) else None


class Method(types.BoundFunction):
    """An @inlined method of `this`, a static object or a value: a call with `this` before its other arguments."""

    def __init__(self, function, this):
        self.function, self.this = inline(function), this
        self.template = type("Template", (AbstractTemplate,), {"key": function, "this": this})  # Numba reads them
        types.Callable.__init__(self, f"{function.__qualname__} of {this}")

    @property
    def key(self):
        return self.function, self.this

    def get_call_type(self, context, args, kws):
        signature = self.function.get_call_type(context, (self.this, *args), kws)
        return signature and signature.as_method()

    def get_call_signatures(self):
        return self.function.get_call_signatures()

    def get_impl_key(self, sig):
        return self.function.get_impl_key(sig)


register_model(Method)(lambda manager, ty: manager[ty.this])


class _Members(AttributeTemplate):
    """An attribute of a tile value is that of its frozen object: an op, or what is known when the kernel is compiled: a number,
    a type, a static object, a function."""

    def generic_resolve(self, this, name):
        if (this, name) not in BOUND:
            resolved = self._resolved(this, name)
            if not isinstance(resolved, types.BoundFunction):
                return resolved
            BOUND[this, name] = resolved  # kept, because a class was made for it, which takes longer than all the rest
        return BOUND[this, name]

    def _resolved(self, this, name):
        op_function = inspect.getattr_static(type(this.spec), name, None)
        if inspect.isfunction(op_function) and op_function in OPS:
            template = OPS[op_function].template

            class OpTemplate(AbstractTemplate):
                key, prefer_literal = op_function, True

                def generic(self, args, kws):
                    sig = template(self.context).generic((this, *args), kws)
                    return sig and sig.as_method()

            return types.BoundFunction(OpTemplate, this)
        if is_static(this.spec) and name not in vars(this.spec) and (method := method_of(type(this.spec), name)):
            return Method(method, this)
        try:
            value = member(this.spec, name)
        except TypeError as error:
            raise TypeError(f"{error}{kernel_line()}") from None
        if isinstance(this, StaticType) and inspect.isfunction(value) and value not in OPS:
            return inline(value)
        if value is None:
            return types.none if hasattr(this.spec, name) else _refuse_attribute(this.spec, name)
        try:
            return self.context.resolve_value_type_prefer_literal(value)
        except ValueError:
            return None


INSTEAD: dict[str, str] = {}  # attributes that arrays have and tiles lack, and what to use instead; unsupported.py fills it


def instead_of(spec, name):
    """The error message for an attribute that a tile or a static object lacks; None for other objects."""
    if name.startswith("_"):  # Python asks for such by itself
        return None
    if isinstance(spec, (rt, rv, pending, st, sv, gl)):
        has = (attribute for attribute in ("rows", "cols", "length", "dtype", "col_vec", "row_vec") if hasattr(spec, attribute))
        an_op = any(inspect.isfunction(op_function) and op.name == name for op_function, op in OPS.items())
        instead = INSTEAD.get(name, f"{name}(t), which is an op" if an_op else None)
        remedy = f"use {instead}" if instead else f"it has {', '.join(has)}"
    elif is_static(spec):
        remedy = f"it has {', '.join(field.name for field in dataclasses.fields(spec))} and its @inlined methods"
    else:
        return None
    return f"{type(spec).__name__!r} object has no attribute {name!r}: {remedy}; got {spec}"


def _refuse_attribute(spec, name):
    if instead := instead_of(spec, name):
        raise TypeError(f"{instead}{kernel_line()}")


def _attribute(context, builder, ty, value, name):
    """Lowers an attribute that is known when the kernel is compiled: a number becomes a constant, all else has no bits."""
    resolved = context.typing_context.resolve_getattr(ty, name)
    if isinstance(resolved, types.Callable):
        return context.get_dummy_value()
    return context.get_constant_generic(builder, types.unliteral(resolved), member(ty.spec, name))


for _t in (Value, StaticType):
    infer_getattr(type(f"{_t.__name__}Members", (_Members,), {"key": _t}))
    registry.lower_getattr_generic(_t)(_attribute)
