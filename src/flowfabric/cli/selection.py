"""The options that select executions by what they have in common."""

from typing import Annotated

import msgspec
import typer

from flowfabric.cli import options
from flowfabric.cli.options import value
from flowfabric.core.state import PublicState
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.reads import Filter

_OLDER = "Only executions that finished (if unfinished: were created) longer ago than this."
STATES = [state.value for state in PublicState if state is not PublicState.RESUMABLE]


def _parse_state(text: str) -> str:
    if text not in STATES:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(STATES)}")
    return text


def complete_state(incomplete: str) -> list[str]:
    """States that a shell may complete the text to."""
    return [state for state in STATES if state.startswith(incomplete)]


class Selection(msgspec.Struct, frozen=True):
    """The executions that the options of a command select: those that match all of them."""

    lane: str | None = None
    task: str | None = None
    state: str | None = None
    tags: tuple[tuple[str, str], ...] = ()
    older_than: float | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no option was given, so that every execution matches."""
        return self == Selection()

    async def where(
        self, backend: Backend, namespace: str | None, *, finished: bool | None = None
    ) -> Filter:
        """The filter of a listing that starts now."""
        before = None
        if self.older_than is not None:
            now = await backend.meta.server_time_ms()
            before = max(0, now - round(self.older_than * 1000))
        return Filter(
            namespace=namespace,
            lane=self.lane,
            kind=self.task,
            state=self.state,
            finished=finished,
            before=before,
            tags=dict(self.tags),
        )


def select(
    *,
    lane: options.Lane = None,
    task: Annotated[str | None, value("NAME", "Only this task.")] = None,
    state: Annotated[
        str | None,
        value(
            *("NAME", "Only this state, such as active, waiting or failed."),
            parser=_parse_state,
            autocompletion=complete_state,
        ),
    ] = None,
    tag: options.Tags = None,
    older_than: Annotated[
        float | None,
        options.duration(_OLDER),
    ] = None,
) -> Selection:
    """The options of every command that selects executions."""
    return Selection(lane, task, state, tuple(options.pairs(tag).items()), older_than)
