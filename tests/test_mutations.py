"""The table of mutations fits the library as it is: each replaces a text that stands once."""

import pytest

from tests.mutate import table


@pytest.mark.parametrize("mutation", table(), ids=lambda m: m.title)
def test_applies(mutation):
    mutation.check()
    assert mutation.old != mutation.new
