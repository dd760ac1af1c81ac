"""What every node owes its users."""

from __future__ import annotations

import pytest

from hookline.nodes import NODES

SCHEMAS = [node.define_schema() for node in NODES]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.node_id)
def test_every_node_says_what_it_is_and_takes(schema) -> None:
    assert schema.node_id.startswith("Hookline")
    assert schema.display_name.endswith("(Hookline)") or "Hookline" in schema.display_name
    assert schema.category.startswith("hookline/")
    assert schema.description and schema.search_aliases
    assert [spec.id for spec in schema.inputs if not spec.tooltip] == []
    assert [spec.id for spec in schema.outputs if not spec.tooltip] == []


def test_ids_are_unique() -> None:
    ids = [schema.node_id for schema in SCHEMAS]
    assert len(set(ids)) == len(ids)
