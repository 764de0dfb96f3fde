"""`python -m flowfabric.bench SCENARIO …`: the bench command alone."""

from __future__ import annotations

import typer

from flowfabric.bench.command import register

app = typer.Typer(add_completion=False)
register(app)
app()
