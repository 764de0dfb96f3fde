"""A part of the conformance tests through a server: the same answers, errors and events.

The rest of `tests/conformance` passes over HTTP, too, except for arguments of a wrong type: the
server refuses those while it decodes them, and names them by their path in the request.
"""

# ruff: noqa: F403 - each import brings the tests of one module
# pyright: reportWildcardImportFromLibrary=false

from tests.conformance.test_exec_complete import *
from tests.conformance.test_exec_listing import *
from tests.conformance.test_exec_reads import *
from tests.conformance.test_flow_cancel_rules import *
from tests.conformance.test_flow_reads import *
from tests.conformance.test_overview import *
from tests.conformance.test_steps import *
from tests.conformance.test_stream_follow import *
from tests.conformance.test_subscriptions import *
