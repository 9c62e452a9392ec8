"""What a script or notebook passes to `stretto.rl`, `sft` and `evaluate`, as texts of a configuration and files.

In: a configuration whose values may be classes, functions, instances, records, models and tokenizers. Out: one that a
file can hold, in which those are names of files of RUN/given, and these files: `code.py` (source.py, pickled.py),
`*.jsonl`, `model`, `tokenizer`. A value that cannot be taken is refused with its key.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError
from stretto.base.files import write_atomic
from stretto.config.section import Section
from stretto_python.given import pickled
from stretto_python.given.models import Saved
from stretto_python.given.records import Records, is_records
from stretto_python.given.source import NoText, Text, importable

HERE = "{given}/"
"""Stands for RUN/given in texts until the run's directory is known."""
_CODE = f"{HERE}code.py:"
_DATASET = "dataset"
_ROWS_KEYS = ("path", "eval_path")
_RESERVED = {"opened", "functools", "rewards_of", "sys"}
_STRETTO = Path(__file__).resolve().parents[2]
_HEADER = "# What a script or notebook gave to this run. Its processes import it.\n"


@dataclass
class Given:
    """The objects of one call, and the files that they become."""

    code: Text = field(default_factory=Text)
    _last: list[str] = field(default_factory=list)
    """Lines at the end of the code: names of pickled objects, and what is put together of others."""
    _names: dict[str, Any] = field(default_factory=dict)
    _pickles: list[tuple[str, bytes]] = field(default_factory=list)
    _records: dict[str, Records] = field(default_factory=dict)
    _saved: dict[str, Saved] = field(default_factory=dict)

    # -- values to texts --

    def plain(self, value: Any, at: tuple[str | int, ...] = ()) -> Any:
        """A value of a configuration with names in place of objects; at: its path.

        Raises: ConfigError for what cannot be taken.
        """
        key = ".".join(map(str, at))
        if isinstance(value, Section):
            value = value.model_dump(mode="json", exclude_unset=True)
        if isinstance(value, Mapping):
            if len(at) >= 2 and at[-2] == "env" and "id" in value:
                return self.environment(value, at)
            return {str(name): self.plain(each, (*at, str(name))) for name, each in value.items()}
        if hasattr(value, "save_pretrained") and ("model" in at[-2:] or "tokenizer" in at[-2:]):
            return self.saved(value, "model" if "model" in at[-2:] else "tokenizer", key)
        if not isinstance(value, type) and type(value).__module__.partition(".")[0] == "torch" and "model" in at:
            raise ConfigError(
                f"{key} is a {type(value).__name__} of torch, which has no save_pretrained; give a model of "
                "transformers, its directory, or its name"
            )
        if at[-2:] == ("data", "name") and is_records(value):
            return self.records(value, "rows" if "val" not in at else "val_rows", key)
        if isinstance(value, list | tuple):
            return [self.plain(each, (*at, index)) for index, each in enumerate(value)]
        if isinstance(value, type) or callable(value):
            return self.named(value, key, _name_of(value))
        return _scalar(value, key)

    def environment(self, entry: Mapping[str, Any], at: tuple[str | int, ...]) -> dict[str, Any]:
        """An entry of `env`: its id may be a class, a function that makes one, or an instance."""
        key = ".".join(map(str, at))
        made, args, rest = entry["id"], dict(entry.get("args") or {}), {**entry}
        if isinstance(made, str):
            if made == _DATASET:
                args = {name: self._dataset_arg(name, each, f"{key}.args.{name}") for name, each in args.items()}
            rest["args"] = {name: self.plain(each, (*at, "args", name)) for name, each in args.items()}
            return rest if rest["args"] else {name: each for name, each in rest.items() if name != "args"}
        name = rest.setdefault("name", environment_name(made))
        objects = {arg: each for arg, each in args.items() if not _is_json(each)}
        label = re.sub(r"\W", "_", f"{name}_env")
        if not callable(made) or (not isinstance(made, type) and hasattr(made, "tasks")):
            _check_instance(made, args, f"{key}.id")
            rest["id"] = self._maker(made, f"{key}.id", label)
        elif objects:
            rest["id"] = self._partial(made, objects, f"{key}.args", label)
        else:
            rest["id"] = self.named(made, f"{key}.id", _name_of(made))
        rest["args"] = {arg: each for arg, each in args.items() if arg not in objects}
        return {arg: each for arg, each in rest.items() if arg != "args" or each}

    def _dataset_arg(self, name: str, value: Any, key: str) -> Any:
        if name in _ROWS_KEYS and is_records(value):
            return self.records(value, "records" if name == "path" else "held_out", key)
        return value

    def records(self, value: Any, name: str, key: str) -> str:
        """Records as the path of their file."""
        records = Records.of(value, key)
        file = f"{self._free(name, value)}.{records.kind}"
        self._records[file] = records
        return f"{HERE}{file}"

    def saved(self, value: Any, name: str, key: str) -> str:
        """A model or tokenizer of transformers as the path of its directory."""
        name = self._free(name, value)
        self._saved[name] = Saved.of(value, key)
        return f"{HERE}{name}"

    # -- code --

    def named(self, value: Any, key: str, name: str) -> str:
        """A class, function or other object as the text under which a run's processes import it."""
        home = importable(value)
        if home is not None and _is_everywhere(home[0]):
            return ":".join(home)
        return _CODE + self.define(value, key, name)

    def define(self, value: Any, key: str, name: str) -> str:
        """Put an object into the code; its name there."""
        if self._names.get(name, self) is value:
            return name
        name = self._free(name, value)
        code = self.code.copy()
        try:
            code.add(name, value)
            if any(self._names.get(each, found) is not found for each, found in code.objects.items()):
                raise NoText("two objects have the same name")
            self.code = code
        except NoText:
            self._last.append(f"{name} = {self._opened(value, key, name)}")
        return name

    def last(self, name: str, text: str, value: Any) -> str:
        """Put a line at the end of the code that defines a name; the text under which it is imported."""
        name = self._free(name, value)
        self._last.append(f"{name} = {text}")
        return _CODE + name

    def _opened(self, value: Any, key: str, name: str) -> str:
        self.code.imports["from stretto_python.given.pickled import opened"] = None
        self._pickles.append((name, pickled.pickled(value, key)))
        return f"{HERE}{name}"  # replaced by `write`, which knows the file

    def _maker(self, value: Any, key: str, name: str) -> str:
        """An instance, as a function that returns it."""
        name = self._free(name, value)
        self._last.append(f"def {name}():\n    return {self._opened(value, key, name)}")
        return _CODE + name

    def _partial(self, made: Any, objects: Mapping[str, Any], key: str, name: str) -> str:
        """A class with those arguments that a configuration cannot hold."""
        self.code.imports["import functools"] = None
        named = [f"{arg}={self.define(each, f'{key}.{arg}', f'{name}_{arg}')}" for arg, each in objects.items()]
        text = f"functools.partial({self.define(made, key, _name_of(made))}, {', '.join(named)})"
        return self.last(name, text, functools.partial(made))

    def _free(self, name: str, value: Any) -> str:
        """The name, or with a number if another object has it."""
        found, number = name, 2
        while found in self._names or found in _RESERVED or self.code.objects.get(found, value) is not value:
            found, number = f"{name}_{number}", number + 1
        self._names[found] = value
        return found

    # -- files --

    def write(self, directory: Path, config: Mapping[str, Any], *, is_trial: bool = False) -> Path:
        """Write all files, and `config` with their names; the path of the latter.

        is_trial: only what is needed to check the configuration: of a model its config, and no records.
        """
        directory.mkdir(parents=True, exist_ok=True)
        for name, saved in self._saved.items():
            saved.write(directory / name, is_trial=is_trial)
        if not is_trial:
            for name, records in self._records.items():
                records.write(directory / name)
            if text := self._code(directory):
                write_atomic(directory / "code.py", text.encode())
        path = directory / "config.json"
        write_atomic(path, (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode(), mode=0o600)
        return path

    def _code(self, directory: Path) -> str:
        last = "\n\n\n".join(self._last)
        for name, data in self._pickles:
            file, digest = pickled.write(data, directory, name)
            last = last.replace(f"{HERE}{name}", f'opened(__file__, "{file}", "{digest}", "{pickled.PYTHON}")', 1)
        if not last and not self.code.definitions and not self.code.imports:
            return ""
        text = self.code.render(last)
        if paths := own_paths():
            first, future, rest = text.partition("from __future__ import annotations\n")
            rest = rest if future else first
            added = f"import sys\n\nsys.path += [path for path in {paths!r} if path not in sys.path]\n"
            text = f"{future}{added}\n{rest}"
        return _HEADER + text


def placed(value: Any, directory: str) -> Any:
    """A configuration with the directory in place of HERE."""
    if isinstance(value, Mapping):
        return {name: placed(each, directory) for name, each in value.items()}
    if isinstance(value, list):
        return [placed(each, directory) for each in value]
    return value.replace(HERE, f"{directory}/") if isinstance(value, str) and value.startswith(HERE) else value


def environment_name(made: Any) -> str:
    """The name of an environment in metrics: its own, or the name of its class with hyphens."""
    own = getattr(made, "name", None)
    if isinstance(own, str) and own:
        return own
    name = getattr(made, "__name__", None) or type(made).__name__
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).replace("_", "-").lower().strip("-<>") or "env"


def own_paths() -> list[str]:
    """Directories that only this process's Python path has: that of a script, and those that it added."""
    found = [Path(each).resolve() for each in sys.path if each]
    return [str(each) for each in found if each.is_dir() and each != Path.cwd() and not _belongs_to_python(each)]


def _belongs_to_python(path: Path) -> bool:
    places = [Path(each).resolve() for each in (sys.prefix, sys.base_prefix)]
    return any(path.is_relative_to(each) for each in places) or "site-packages" in path.parts or path == _STRETTO


def _is_everywhere(module: str) -> bool:
    """Whether another process, started in this directory, finds a module without the path of this one."""
    file = getattr(sys.modules[module.partition(".")[0]], "__file__", None)
    if file is None:
        return module in sys.builtin_module_names
    path = Path(file).resolve()
    root = path.parent.parent if path.name == "__init__.py" else path.parent
    return root == Path.cwd() or str(root) not in own_paths()


def _check_instance(value: Any, args: Mapping[str, Any], key: str) -> None:
    if not all(hasattr(value, each) for each in ("tasks", "rollout")):
        raise ConfigError(
            f"{key} is a {type(value).__name__}, which has no `tasks` and `rollout`; give a class derived from "
            "SingleTurnEnv or MultiTurnEnv, an instance of one, a function that makes one, or the name of one. Records "
            "go to dataset="
        )
    if args:
        raise ConfigError(f"{key} is an instance, which has its arguments already; leave args out, or give its class")


def _name_of(value: Any) -> str:
    name = getattr(value, "__name__", "") or type(value).__name__
    return name if name.isidentifier() else "function"


def _is_json(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_json(each) for name, each in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | int | float | Path) or hasattr(value, "item")


def _scalar(value: Any, key: str) -> Any:
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, str | int | float):
        return value
    if hasattr(value, "item") and getattr(value, "size", 2) == 1:  # numpy's numbers
        return value.item()
    raise ConfigError(
        f"{key} is a {type(value).__name__}, which this key cannot hold; give text, a number, a list, a dict, or a "
        "class or function"
    )


def as_list(value: Any) -> list[Any]:
    """The value, or the values of a list."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
