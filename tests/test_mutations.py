"""The table of mutations fits the library as it is: each replaces a text that stands once, and what comes of it is Python."""

import itertools

import pytest

from tests.mutate import table

SECTIONS = {name: list(mutations) for name, mutations in itertools.groupby(table(), lambda m: m.section)}


@pytest.mark.parametrize("section", SECTIONS)
def test_applies(section):
    for mutation in SECTIONS[section]:
        mutation.mutated()


def test_each_has_a_name_of_its_own():
    titles = [(m.section, m.title) for m in table()]
    assert len(titles) >= 150 and len(set(titles)) == len(titles)
