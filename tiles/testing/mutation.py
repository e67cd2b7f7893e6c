"""Would the test notice? A fault is put into the tested module, and the test must fail."""

import contextlib
import importlib.abc
import importlib.util
import sys
import unittest
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from ..op import OPS


def broken(module: str, old: str, new: str) -> AbstractContextManager[None]:
    """Inside `with broken("mine.norm", "rsqrt(", "sqrt("):` the module has `new` where it had `old`, and the block must fail.

    The text must occur once in the module's file, which is not touched: the package is imported anew with the changed text,
    and so are the names of the calling file and the modules beside it. So the block calls tests as they stand there.
    Afterwards everything is as before. The calling file itself is named `__name__`.

    It is for the test itself to show that it passes without the fault. What noticed the fault is printed (`pytest -rP` shows
    it).

    AssertionError: the block did not fail, so the test would not notice. Any exception of the block is a
    failure (a wrong number, a Hazard, a refusal), except those that say that `new` is no program: NameError, ImportError.
    ValueError: `old` does not occur, or more than once."""
    return _broken(sys._getframe(1).f_globals, module, old, new)


class _Changed(importlib.abc.SourceLoader):
    """Loads a module from its file, with one text in place of another."""

    def __init__(self, path, old, new):
        self.path, self.old, self.new = path, old, new

    def get_filename(self, name):
        return self.path

    def get_data(self, path):
        return Path(path).read_text().replace(self.old, self.new).encode()

    def path_stats(self, path):
        raise OSError("what is kept on disk is of another text")


class _Finder(importlib.abc.MetaPathFinder):
    """An importer, asked before all others, that loads the module with the fault."""

    def __init__(self, spec, loader):
        self.spec, self.loader = spec, loader

    def find_spec(self, name, path=None, target=None):
        if not self.spec or name != self.spec.name:
            return None
        places = self.spec.submodule_search_locations
        return importlib.util.spec_from_file_location(
            name, self.loader.path, loader=self.loader, submodule_search_locations=places
        )


@contextlib.contextmanager
def _broken(caller, module, old, new) -> Iterator[None]:
    name, source_file = caller["__name__"], caller.get("__file__")
    spec = caller.get("__spec__") if module == name else importlib.util.find_spec(module)
    path = source_file if module == name else spec and spec.origin
    if not path or not Path(path).is_file():
        raise ValueError(f"broken: {module!r} is no module with a file of its own")
    if (count := Path(path).read_text().count(old)) != 1:
        raise ValueError(f"broken: {old!r} stands {count} times in {path}, not once")
    loader, ops, names = _Changed(path, old, new), set(OPS), dict(caller)
    finder = _Finder(spec, loader)
    package, folder = module.partition(".")[0], source_file and Path(source_file).parent

    def concerned():
        """Modules of the package, and those beside the calling file, but for that itself."""
        for known, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if known != name and (known.partition(".")[0] == package or (folder and file and Path(file).parent == folder)):
                yield known, module

    originals = dict(concerned())
    try:
        for known in originals:
            del sys.modules[known]
        sys.meta_path.insert(0, finder)
        if source_file:
            text = loader.get_data(path) if module == name else Path(source_file).read_bytes()
            exec(compile(text, source_file, "exec", dont_inherit=True), caller)
        yield from _failing(f"no test failed with {new!r} in place of {old!r} in {path}")
    finally:
        sys.meta_path.remove(finder)
        for known, _ in concerned():
            del sys.modules[known]
        sys.modules.update(originals)
        caller.clear()
        caller.update(names)
        for op_function in set(OPS) - ops:
            del OPS[op_function]


def _failing(otherwise) -> Iterator[None]:
    try:
        yield
    except (NameError, ImportError, unittest.SkipTest):
        raise
    except Exception as error:
        print(f"noticed: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    except BaseException as error:
        if type(error).__name__ != "Failed":  # which pytest.fail and pytest.raises raise
            raise
        print(f"noticed: {error}")
    else:
        raise AssertionError(otherwise)
