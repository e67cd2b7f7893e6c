"""The ops' tests take `run` and `sample` from tiles/testing/plugin.py."""

import pytest

pytest.register_assert_rewrite("mistakes")
