"""The ops' tests take `run` and `sample` from tiles/testing/plugin.py."""

import pytest

pytest.register_assert_rewrite("mistakes")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """CI compiles a case of a test if it has a value of a parameter that none before it had. The others run by meaning, and as
    compiled before a release: a kernel takes seven times as long to compile as to interpret."""
    compiled = {}
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if params.get("run") == "ptx" and len(params) > 1:
            values = {(name, repr(value)) for name, value in params.items() if name != "run"}
            before = compiled.setdefault(item.nodeid.partition("[")[0], set())
            if values <= before:
                item.add_marker(pytest.mark.release)
            before |= values
