"""Names of nodes and edges."""

import uuid

from hypothesis import given
from hypothesis import strategies as st

from flowfabric.core.ids import derived_uuid


@given(st.uuids(), st.text())
def test_derived_ids_are_those_of_the_standard_library(namespace: uuid.UUID, name: str) -> None:
    assert derived_uuid(str(namespace), name) == str(uuid.uuid5(namespace, name))
