"""The tables of arguments of attention's functions, all together."""

import importlib
import pkgutil

import attention.plans
import attention.public
from tiles.calls.axes import AXES
from tiles.calls.schema import Schema


def test_every_named_axis_is_one_of_a_table():
    """A table with an unknown name is refused when it is read; a name that no table has any more is found here."""
    folders = attention.public, attention.plans
    names = [module.name for folder in folders for module in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}.")]
    tables = [x for name in names for x in vars(importlib.import_module(name)).values() if isinstance(x, Schema)]
    used = {axis for table in tables for row in table.arguments.values() for axes in row.axes for axis in axes}
    assert used - {"*"} == AXES.keys()
