"""Importing the application that `module:app` names."""

import importlib
import sys
import traceback
from difflib import get_close_matches
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
    module = _imported(module_name)
    return _fabric(module, attribute)


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The module itself or its package is missing, not something that it imports.
        if error.name is None or not (f"{name}.").startswith(f"{error.name}."):
            raise _broken(name, error) from error
        raise CliError("import", f"no module named {error.name!r}", _nearest(name)) from error
    except FlowFabricError:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise _broken(name, error) from error


def _nearest(name: str) -> str:
    here = Path.cwd()
    known = [path.stem for path in here.glob("*.py")]
    known += [path.parent.name for path in here.glob("*/__init__.py")]
    close = get_close_matches(name.partition(".")[0], known, 1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"modules are imported from {here} and from the installed packages"


def _broken(name: str, error: BaseException) -> CliError:
    """Print the traceback of a module that failed to import, for its author."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        frame
        for frame in frames
        if frame.filename != __file__ and "importlib" not in frame.filename
    ]
    shown = "".join(traceback.format_list(ours) + traceback.format_exception_only(error))
    sys.stderr.write(f"Traceback (most recent call last):\n{shown}" if ours else shown)
    return CliError(
        "import",
        f"importing {name!r} failed: {type(error).__name__}: {error}",
        "fix the module; the traceback above shows where it failed",
    )


def _fabric(module: ModuleType, attribute: str) -> Fabric:
    found: Any = module
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            problem = f"module {module.__name__!r} has no attribute {attribute!r}"
            raise CliError("import", problem, _candidates(module)) from None
    if not isinstance(found, Fabric):
        problem = f"{module.__name__}:{attribute} is a {type(found).__name__}, not a Fabric"
        raise CliError("import", problem, _candidates(module))
    return found


def _candidates(module: ModuleType) -> str:
    fabrics = [name for name, value in vars(module).items() if isinstance(value, Fabric)]
    if fabrics:
        return f"did you mean {' or '.join(f'{module.__name__}:{name}' for name in fabrics)}?"
    return f"{module.__name__} has no Fabric: add `app = flowfabric.Fabric()` to it"
