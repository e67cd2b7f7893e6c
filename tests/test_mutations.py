"""The table of mutations fits the library as it is: each replaces a text that stands once."""

import pytest

from tests.mutations import MUTATIONS


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.title)
def test_applies(mutation):
    mutation.check()
    assert mutation.old != mutation.new
