"""Imports the application that `module:app` names."""

import importlib
import sys
import traceback
from difflib import get_close_matches
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from flowfabric.app.fabric import Fabric
from flowfabric.cli.errors import CliError
from flowfabric.core.errors import FlowFabricError


def load_app(spec: str) -> Fabric:
    """Import the module, also from the current folder, and return its `Fabric`."""
    module_name, _, attribute = spec.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    module = _import(module_name)
    try:
        found: Any = attrgetter(attribute)(module)
    except AttributeError:
        problem = f"module {module_name!r} has no attribute {attribute!r}"
        raise CliError("import", problem, _fabrics_of(module)) from None
    if not isinstance(found, Fabric):
        problem = f"{spec} is not a Fabric; its type is {type(found).__name__}"
        raise CliError("import", problem, _fabrics_of(module))
    return found


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (FlowFabricError, KeyboardInterrupt):
        raise
    except BaseException as error:
        # If the name differs, the missing module is one that the application imports.
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            missing = error.name or name
            raise CliError("import", f"no module named {missing!r}", _nearest(missing)) from error
        _print_traceback(error)
        problem = f"importing {name!r} failed: {type(error).__name__}: {error}"
        hint = "fix the module; the traceback above shows where it failed"
        raise CliError("import", problem, hint) from error


def _nearest(name: str) -> str:
    here = Path.cwd()
    package, dot, last = name.rpartition(".")
    folder = here.joinpath(*package.split("."))
    known = [path.stem for path in folder.glob("*.py")]
    known += [path.parent.name for path in folder.glob("*/__init__.py")]
    close = get_close_matches(last, known, 1)
    if close:
        return f"did you mean '{package}{dot}{close[0]}'?"
    return f"modules are imported from {here} and from the installed packages"


def _print_traceback(error: BaseException) -> None:
    """Print where the module failed, without the frames of the import itself."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and "importlib" not in frame.filename
    ]
    shown = "".join(traceback.format_list(frames) + traceback.format_exception_only(error))
    sys.stderr.write(f"Traceback (most recent call last):\n{shown}" if frames else shown)


def _fabrics_of(module: ModuleType) -> str:
    fabrics = [name for name, value in vars(module).items() if isinstance(value, Fabric)]
    if fabrics:
        return f"did you mean {' or '.join(f'{module.__name__}:{name}' for name in fabrics)}?"
    if eclipsed := _eclipsed_file(module):
        return f"{module.__name__!r} is also a module of Python or of a package: rename {eclipsed}"
    return f"{module.__name__} has no Fabric: add `app = flowfabric.Fabric()` to it"


def _eclipsed_file(module: ModuleType) -> Path | None:
    """The file in the current folder that was not imported, because its name was already taken."""
    path = Path(f"{module.__name__.replace('.', '/')}.py")
    imported = Path(getattr(module, "__file__", None) or "")
    return path if path.is_file() and path.resolve() != imported.resolve() else None
