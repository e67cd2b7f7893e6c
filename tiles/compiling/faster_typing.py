"""Numba's search for types with less to do: what follows from the same types, constants and rules is found once. See
faster_numba.py."""

import inspect
import weakref

from numba.core.types.functions import BaseFunction
from numba.cuda import target, types, utils
from numba.cuda.core import base, typeinfer
from numba.cuda.typing import context

from .numba_helpers import table_of_kernel
from .type_inference import Inferer

_of_numbers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # function's type: {types of arguments: the call's type}
_find = BaseFunction.get_call_type


def _call_type(self, context, args, kws):
    """A function's type of a call. Of numbers, each once: to find that of `i + 1` Numba tries dozens of rules and writes down
    why each of them is not it, which took a twelfth of the time."""
    if kws or not all([isinstance(x, (types.Number, types.Boolean)) for x in args]):
        return _find(self, context, args, kws)
    known = _of_numbers.setdefault(self, {})
    if args not in known:
        known[args] = _find(self, context, args, kws)
    return known[args]


class _Inferer(Inferer):
    """The search for types; once all are known, nothing of it stays."""

    def unify(self, raise_errors=True):
        unified = super().unify(raise_errors)
        vars(self).clear()
        return unified


_resolve_call = typeinfer.CallConstraint.resolve


def _resolve(self, search, variables, fnty):
    """Find the type of a call, unless all that it follows from is what it was. Numba goes through all statements until a round
    tells nothing new, so each call was resolved twice at least."""
    names = [x.name for x in (*self.args, *(value for _, value in self.kws), *([self.vararg] if self.vararg else ()))]
    known = fnty, [variables[name].type for name in names]
    if self.signature is None or not self.signature.return_type.is_precise() or vars(self).get("known") != known:
        _resolve_call(self, search, variables, fnty)
        self.known = known


_resolve_attribute = typeinfer.GetAttrConstraint.__call__


def _attribute(self, search):
    """Find the type of an attribute, unless that of its object is what it was."""
    known = search.typevars[self.value.name].type
    if known is None or vars(self).get("known") is not known:
        _resolve_attribute(self, search)
        self.known = known


_packers = table_of_kernel()  # types of arguments: how they are passed
_packer = base.BaseContext.get_arg_packer


def _packer_of(self, arguments):
    """How arguments of these types are passed; Numba works it out for each call."""
    key = tuple(arguments)
    if key not in _packers:
        _packers[key] = _packer(self, arguments)
    return _packers[key]


_values = table_of_kernel()  # a constant's identity: (the constant, its type)
_type_of_value = target.CUDATypingContext.resolve_value_type


def _value_type(self, value):
    """The type of a global or another constant. Numba asks all its rules, and catches their errors, each time it is named."""
    known = _values.get(id(value))
    if known is None:
        known = _values[id(value)] = value, _type_of_value(self, value)
    return known[1]


_rule_counts: dict[int, list[int]] = {}  # of a context's registries: how much each held when they were last read
_contexts_read: list[int] = []  # the contexts whose registries are being read


def _refreshed(refresh):
    """A context's look for what registries hold that it has not seen. Numba looks before each function, whenever there is
    nothing for some types yet, and for each attribute of NumPy's that it reads there; here it looks if they hold more than
    before, and not again inside such a look."""

    def count_rules(registry):
        both = *registry._registries, *getattr(getattr(registry, "typing_context", None), "_registries", ())
        return [len(entries) for registry in both for entries in vars(registry).values()]

    def refreshed(self):
        key = id(self._registries)  # which a context shares with its copies
        if key in _rule_counts and (_contexts_read or _rule_counts[key] == count_rules(self)):
            return
        _contexts_read.append(key)
        try:
            refresh(self)
        finally:
            _contexts_read.pop()
        _rule_counts[key] = count_rules(self)

    return refreshed


_signatures: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # function: its signature


def _signature(function):
    """A Python function's. Numba asks that of the same ones again and again, for each call of theirs."""
    try:
        return _signatures[function]
    except KeyError:
        signature = _signatures[function] = inspect.signature(function)
        return signature
    except TypeError:  # what cannot be looked up
        return inspect.signature(function)


_hash_of_key, _this_process = types.Type.__hash__, object()


def _hash(self):
    """A type's hash, which is that of all it is made of. It is looked up some ten times for each variable. One that was pickled
    elsewhere, where texts have other hashes, is computed anew."""
    try:
        process, value = self._hash
    except AttributeError:
        process = None
    if process is not _this_process:
        _, value = self._hash = _this_process, _hash_of_key(self)
    return value


REPLACEMENTS = [  # (owner, name, what stands in its place)
    (BaseFunction, "get_call_type", _call_type),
    (typeinfer, "TypeInferer", _Inferer),
    (typeinfer.CallConstraint, "resolve", _resolve),
    (typeinfer.GetAttrConstraint, "__call__", _attribute),
    (type(types.Type), "__instancecheck__", type.__instancecheck__),  # no class is registered as another's kind
    (base.BaseContext, "get_arg_packer", _packer_of),
    (target.CUDATypingContext, "resolve_value_type", _value_type),
    (base.BaseContext, "refresh", _refreshed(base.BaseContext.refresh)),
    (context.BaseContext, "refresh", _refreshed(context.BaseContext.refresh)),
    (utils, "pysignature", _signature),
    (types.Type, "__hash__", _hash),
]
