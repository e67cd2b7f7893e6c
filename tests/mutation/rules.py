"""The faults that are made by rule: for each what it matches in the syntax tree, and what it makes of that.

A rule is a function of a node, of the kinds that stand above it, and the node's source. It yields (fault, edits) for each fault
that it makes of the node; the fault is what the mutation's name says, without spaces. What nobody could notice is not made: see
`SourceFile.nodes`. Layouts, descriptors, PTX text and numerics are no rule's business: by_hand.toml has faults of these.
"""

import ast
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from .sources import Edit, Mutation, SourceFile, dotted, unseen

Faults = Iterator[tuple[str, tuple[Edit | None, ...]]]
RULES: dict[type, list[Callable[[ast.AST, SourceFile], Faults]]] = defaultdict(list)  # by the kinds of nodes that they match

# calls that order, hand over, clear or check, and give nothing: without them the code runs on
ORDERS = "fence wait sync commit arrive release emit_sync publish reads_done warp_sync mbarrier acquire signal"
CLEARS = "zero clear fill expect open close add append update store copy give take check needs refuse"
DROPPED = re.compile(rf"_*({'|'.join((ORDERS + ' ' + CLEARS).split())})(?!_registers)\w*")
PASSED_THROUGH = re.compile(r"(wait|fence|abs|rounded|round|clip|after)\w*")  # f(x) where x is nearly right
EDGES = {  # comparison: (its neighbour, and what is added on the right to err to the other side)
    ast.Lt: ("<", "<=", "- 1"),
    ast.LtE: ("<=", "<", "+ 1"),
    ast.Gt: (">", ">=", "+ 1"),
    ast.GtE: (">=", ">", "- 1"),
}
OPPOSITES = {ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is")}
OPPOSITES |= {ast.In: ("in", "not in"), ast.NotIn: ("not in", "in")}
SIGNS = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mod: ("%", "//"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<")}
SIGNS |= {ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&")}
COUNTS = {"int32": 0, "truncate": 2, "less": 1, "less_equal": 1, "greater": 1, "greater_equal": 1, "zero_rows": 1, "clear": 1}
COUNTS |= {"right_fill": 1, "left_fill": 1, "lower_fill": 1, "upper_fill": 1}  # which argument is the edge
CALLED = dict(["min max".split(), "minimum maximum".split(), "any all".split(), "floor ceil".split(), "rows cols".split()])
CALLED |= {other: name for name, other in CALLED.items()}
EMITTED = {"add": "sub", "sub": "add", "and_": "or_", "or_": "and_", "shl": "lshr", "lshr": "shl", "udiv": "urem"}  # by b.
EMITTED |= {"urem": "udiv", "icmp_signed": "icmp_unsigned", "sext": "zext", "zext": "sext"}
EMITTED_EDGES = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
SYMMETRIC = re.compile(r"min|max|minimum|maximum|add|fadd|mul|fmul|and_|or_|xor|print|zip|isinstance|product|gcd|lcm|all_same")
MARKS = {"strict", "effect"}  # options that assert, or that let the compiler leave out what nobody uses
PROMISES = {  # (the place, the value) of an argument that is a promise: without it code is slower and does the same
    **dict.fromkeys(("load", "store"), (5, True)),  # aligned
    **{"sync": (0, False), "publish": (1, False), "release": (2, False)},  # fenced
}
PLACES = ast.Name | ast.Attribute


def rule(*kinds: type):
    def register(make):
        for kind in kinds:
            RULES[kind].append(make)
        return make

    return register


def called(node: ast.AST) -> str:
    """The last name of what is called; "" if that has none."""
    return dotted(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""


def by_builder(node: ast.AST) -> bool:
    """Is this b.something(...), which emits an instruction?"""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and dotted(node.func.value) == "b"


def number(node: ast.AST) -> bool:
    """May this be an integer, by its looks?"""
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    return isinstance(node, PLACES | ast.BinOp | ast.Call | ast.Subscript | ast.UnaryOp) and not isinstance(
        getattr(node, "op", None), ast.Not
    )


def literal(node: ast.AST) -> bool:
    """Is this a text or a collection, by its looks?"""
    text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return text or isinstance(node, ast.List | ast.Tuple | ast.JoinedStr | ast.Dict | ast.Set | ast.ListComp)


def shift_by_one(source: SourceFile, node: ast.AST, by: str) -> Edit:
    """`node` becomes `node + 1` or `node - 1`."""
    text = source.text(node)
    if isinstance(node, ast.Constant):
        return source.replaced(node, str(node.value + int(by.replace(" ", ""))).encode())
    if not isinstance(node, PLACES | ast.Call | ast.Subscript):
        text = b"(%s)" % text
    return source.replaced(node, b"(%s %s)" % (text, by.encode()))


def swapped(source: SourceFile, one: ast.AST, other: ast.AST) -> tuple[Edit, Edit]:
    return source.replaced(one, source.text(other)), source.replaced(other, source.text(one))


# ---- order: what is waited for, published, given back ----------------------------------------------------------------
@rule(ast.Expr)
def drops_a_call(node, source) -> Faults:
    """A fence, a wait, a commit, a release, a clearing or a check is missing."""
    if isinstance(node.value, ast.Call) and DROPPED.fullmatch(called(node.value)):
        yield f"drop-{called(node.value)}", (source.replaced(node, b"pass"),)


@rule(ast.Call)
def passes_through(node, source) -> Faults:
    """`wait(x)` becomes `x`, and so do other calls."""
    if PASSED_THROUGH.fullmatch(called(node)) and node.args and not isinstance(node.args[0], ast.Starred):
        yield f"no-{called(node)}", (source.replaced(node, b"(%s)" % source.text(node.args[0])),)


@rule(ast.Call)
def flips_a_parity(node, source) -> Faults:
    """A phase's parity is the other one."""
    if by_builder(node) and called(node) == "xor" and ast.unparse(node.args[1]) == "b.u32(1)":
        yield "parity", (source.replaced(node, source.text(node.args[0])),)
    else:
        for value in [*node.args, *(keyword.value for keyword in node.keywords)]:
            if re.search("parity|phase", dotted(value)) and called(node) != "xor":
                flipped = b"b.xor(%s, b.u32(1))" if node.args and ast.unparse(node.args[0]) == "b" else b"(%s ^ 1)"
                yield "parity", (source.replaced(value, flipped % source.text(value)),)


@rule(ast.For, ast.While)
def drops_a_statement(node, source) -> Faults:
    """A round of a loop leaves one thing out. (What a round alone binds would be missing, which is no fault that is made.)"""
    for statement in node.body:
        match statement:
            case ast.AugAssign() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield "drop-statement", (source.replaced(statement, b"pass"),)
            case ast.Expr(value=ast.Call() as call) if not DROPPED.fullmatch(called(call)):
                yield "drop-statement", (source.replaced(statement, b"pass"),)


@rule(ast.Call)
def opens_a_guard(node, source) -> Faults:
    """All threads run what `with b.if_then(...)` is for some."""
    if called(node) == "if_then":
        yield "no-guard", (source.replaced(node, b'__import__("contextlib").nullcontext()'),)


# ---- edges ---------------------------------------------------------------------------------------------------------
@rule(ast.Compare)
def misses_an_edge(node, source) -> Faults:
    """< for <=, and an edge that is one off to the other side."""
    for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators):
        if dotted(left).endswith(".width"):  # of an integer, which may be widened to its own width
            continue
        if type(op) in EDGES and number(right):
            old, new, by = EDGES[type(op)]
            yield f"{new}for{old}", (source.between(left, right, old, new),)
            yield f"{old}{by}".replace(" ", ""), (shift_by_one(source, right, by),)
        elif type(op) in OPPOSITES:
            old, new = OPPOSITES[type(op)]
            yield f"{new}for{old}".replace(" ", "_"), (source.between(left, right, old, new),)


@rule(ast.Call)
def emits_another_edge(node, source) -> Faults:
    """< for <= in an instruction."""
    match node:
        case ast.Call(args=[ast.Constant(value=str(old)) as sign, *_]) if by_builder(node) and old in EMITTED_EDGES:
            yield f"emitted-{EMITTED_EDGES[old]}for{old}", (source.replaced(sign, f'"{EMITTED_EDGES[old]}"'.encode()),)


@rule(ast.Call)
def ends_a_range_elsewhere(node, source) -> Faults:
    """A loop has a round too many or too few, or begins late."""
    if called(node) in ("range", "arange") and node.args and not isinstance(node.args[0], ast.Starred):
        stop = node.args[min(len(node.args) - 1, 1)]
        for by in ("+ 1", "- 1"):
            if number(stop):
                yield f"range{by}".replace(" ", ""), (shift_by_one(source, stop, by),)
        if len(node.args) > 1 and number(node.args[0]):
            yield "range-start+1", (shift_by_one(source, node.args[0], "+ 1"),)


@rule(ast.Call)
def counts_one_off(node, source) -> Faults:
    """One row or column more, or less, is masked, cleared, cut off or computed."""
    place = COUNTS.get(called(node), len(node.args))
    for value in node.args[place : place + 1]:
        if number(value) and not (called(node) == "int32" and not isinstance(value, ast.BinOp)):
            for by in ("+ 1", "- 1"):
                yield f"{called(node)}{by}".replace(" ", ""), (shift_by_one(source, value, by),)


@rule(ast.Subscript)
def takes_a_neighbour(node, source) -> Faults:
    """x[i + 1] for x[i], and slices that begin or end beside their place."""
    for index in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
        match index:
            case ast.Slice(lower=lower, upper=upper):
                for bound, bys in ((lower, ("+ 1",)), (upper, ("+ 1", "- 1"))):
                    if bound and number(bound):
                        yield from ((f"slice{by}".replace(" ", ""), (shift_by_one(source, bound, by),)) for by in bys)
            case ast.Constant(value=int()) | ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.FloorDiv() | ast.Mod()):
                yield "index+1", (shift_by_one(source, index, "+ 1"),)


@rule(ast.Call)
def emits_another_number(node, source) -> Faults:
    """An immediate of an instruction is one more."""
    if by_builder(node) and called(node) in ("u32", "i32", "u64", "i64") and len(node.args) == 1 and number(node.args[0]):
        yield "immediate+1", (shift_by_one(source, node.args[0], "+ 1"),)


# ---- arithmetic ----------------------------------------------------------------------------------------------------
@rule(ast.BinOp, ast.UnaryOp, ast.AugAssign)
def takes_another_operator(node, source) -> Faults:
    """- for +, a tile further, and rounding to the other side."""
    match node:
        case ast.BinOp(left=left, op=op, right=right):
            if type(op) in SIGNS and not literal(left) and not literal(right):
                old, new = SIGNS[type(op)]
                yield f"{new}for{old}", (source.between(left, right, old, new),)
            if isinstance(op, ast.Mult) and isinstance(left, PLACES) and isinstance(right, PLACES):
                yield "*+1", (shift_by_one(source, right, "+ 1"),)
        case ast.UnaryOp(
            op=ast.USub(), operand=ast.BinOp(left=ast.UnaryOp(op=ast.USub()) as under, op=ast.FloorDiv()) as quotient
        ):
            text = source.text(quotient)
            inner = source.text(under.operand) + text[len(source.text(under)) :]
            yield "floorforceil", (source.replaced(node, b"(%s)" % inner),)
        case ast.AugAssign(target=target, op=op, value=value) if type(op) in SIGNS:
            old, new = SIGNS[type(op)]
            yield f"{new}=for{old}=", (source.between(target, value, f"{old}=", f"{new}="),)


@rule(ast.Call)
def calls_another(node, source) -> Faults:
    """max for min, and other pairs."""
    name, pairs = called(node), EMITTED if by_builder(node) else CALLED
    if name in pairs and not (name in ("sext", "zext") and dotted(node.args[-1]) != "i64"):  # flags are 0 or not
        end = source.span(node.func)[1]
        yield f"{pairs[name]}for{name}", (Edit(end - len(name), end, pairs[name].encode()),)


@rule(ast.Call, ast.Subscript)
def swaps_two(node, source) -> Faults:
    """Arguments, indices or results of the same kind stand for each other."""
    lists = {"arguments": [], "indices": []}
    if isinstance(node, ast.Call) and not SYMMETRIC.fullmatch(called(node)):
        lists["arguments"] = node.args
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple):
        lists["indices"] = node.slice.elts
    for kind, values in lists.items():
        for one, other in itertools.pairwise(values):
            alike = dotted(one) and type(one) is type(other) and dotted(one).isupper() == dotted(other).isupper()
            if alike and dotted(one) not in ("b", dotted(other)):
                yield f"swap-{kind}", swapped(source, one, other)


# ---- conditions ----------------------------------------------------------------------------------------------------
@rule(ast.If, ast.IfExp, ast.comprehension)
def does_not_look(node, source) -> Faults:
    """A check refuses nothing; a condition holds always, or never."""
    tests = [node.test] if isinstance(node, ast.If | ast.IfExp) else getattr(node, "ifs", [])
    for test in tests:
        binds_a_name = any(isinstance(n, ast.NamedExpr) for n in ast.walk(test))  # which is read later
        never, always = (b"((%s) and False)", b"((%s) or True)") if binds_a_name else (b"False", b"True")
        text = (source.text(test),) if binds_a_name else ()
        if isinstance(node, ast.If) and refuses(node.body[-1]):
            yield "unchecked", (source.replaced(test, never % text),)
        else:
            yield "never", (source.replaced(test, never % text),)
            yield "always", (source.replaced(test, always % text),)


def refuses(statement: ast.AST) -> bool:
    """Does this say that something is wrong?"""
    return isinstance(statement, ast.Raise) or (isinstance(statement, ast.Expr) and unseen(statement.value))


@rule(ast.BoolOp)
def forgets_a_condition(node, source) -> Faults:
    """One of several conditions is not looked at, or one is enough where all are needed."""
    old = "and" if isinstance(node.op, ast.And) else "or"
    new = "or" if old == "and" else "and"
    gaps = tuple(source.between(one, other, old, new) for one, other in zip(node.values, node.values[1:]))
    yield f"{new}for{old}", gaps
    for index, value in enumerate(node.values):
        other_values = [b"(%s)" % source.text(other) for k, other in enumerate(node.values) if k != index]
        if not any(isinstance(n, ast.NamedExpr) for n in ast.walk(value)):  # which is read later
            yield f"drop-{old}", (source.replaced(node, b"(%s)" % f" {old} ".encode().join(other_values)),)


@rule(ast.keyword, ast.Return, ast.Call)
def flips_a_flag(node, source) -> Faults:
    """True becomes False, and False becomes True, but for promises and for loads without a fence."""
    flags = {True: b"False", False: b"True"}
    match node:
        case (
            ast.keyword(arg="aligned", value=ast.Constant(value=True))
            | ast.keyword(arg="fenced", value=ast.Constant(value=False))
        ):
            pass  # a promise less, a fence more
        case ast.keyword(arg=str(name), value=ast.Constant(value=bool(value)) as constant) if name not in MARKS:
            yield f"flip-{name}", (source.replaced(constant, flags[value]),)
        case ast.Return(value=ast.Constant(value=bool(value)) as constant):
            yield f"return-{not value}", (source.replaced(constant, flags[value]),)
        case ast.Call(args=arguments):
            for place, constant in enumerate(arguments):
                promise = (place, getattr(constant, "value", None)) == PROMISES.get(called(node))
                if isinstance(constant, ast.Constant) and isinstance(constant.value, bool) and not promise:
                    yield f"pass-{not constant.value}", (source.replaced(constant, flags[constant.value]),)


@rule(ast.Call)
def forgets_an_option(node, source) -> Faults:
    """A keyword argument is not passed on. A load's fence, which is there by default, is missing."""
    if called(node) in ("dict", "replace", "_replace"):  # which have no defaults
        return
    for keyword in node.keywords:
        flag = isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, bool)
        if keyword.arg == "fenced" and not flag:
            yield "unfenced", (source.replaced(keyword.value, b"False"),)
        elif keyword.arg and keyword.arg != "aligned" and not flag:
            start, end = source.span(keyword)
            after, before = re.match(rb"\s*,\s*", source.data[end:]), re.search(rb",\s*$", source.data[:start])
            if after:
                end += after.end()
            elif before:
                start = before.start()
            yield f"drop-{keyword.arg}=", (Edit(start, end, b""),)


def mutations(source: SourceFile) -> Iterator[Mutation]:
    """All faults that rules make of a file, each with its name."""
    counted = Counter()
    for function, node in source.nodes():
        for make in RULES.get(type(node), ()):
            for fault, edits in make(node, source):
                if None not in edits:
                    counted[function, fault] += 1
                    name = f"{source.path}::{function}::{fault}#{counted[function, fault]}"
                    yield Mutation(name, source.path, tuple(edits))
