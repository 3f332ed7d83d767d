# SPDX-License-Identifier: Apache-2.0
"""Write the JSON Schemas of what the commands print with ``--json``: docs/schemas/.

    python -m scripts.json_schemas

They follow from the dataclasses that the JSON is made of, by msgspec, which vLLM brings.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from analysis.renderers.json import KINDS, VERSION
from profilemate.commands import doctor_ray
from profilemate.live import frame
from profilemate.live.watching import View

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schemas() -> dict[str, dict[str, Any]]:
    """Each kind's schema, by its name."""
    found: dict[str, dict[str, Any]] = {}
    for kind in sorted({*KINDS.values()}):
        types = [each for each, named in KINDS.items() if named == kind]
        made = [_schema(each) for each in types]
        version = {f"{kind}_version": {"const": VERSION}}
        for one in made:
            one["properties"] = version | one["properties"]
            one["required"] = [*version, *one["required"]]
        found[kind] = _titled(kind, made[0] if len(made) == 1 else _any_of(made))
    found["live"] = _titled("live", _listed("live", frame.VERSION, "sessions", View))
    found["nodes"] = _titled(
        "nodes", _listed("nodes", doctor_ray.VERSION, "nodes", doctor_ray.Node)
    )
    return found


def _listed(kind: str, version: int, key: str, of: type) -> dict[str, Any]:
    """An object with a version and a list."""
    one = _schema(of)
    parts = one.pop("$defs", {})
    properties = {
        f"{kind}_version": {"const": version},
        key: {"type": "array", "items": one},
    }
    return {
        "$defs": parts,
        "type": "object",
        "properties": properties,
        "required": [*properties],
    }


def _schema(kind: type) -> dict[str, Any]:
    made: dict[str, Any] = _plain(msgspec.json.schema(kind))
    name = made.pop("$ref").rpartition("/")[2]
    return {"$defs": made["$defs"], **made["$defs"].pop(name)}


def _any_of(made: list[dict[str, Any]]) -> dict[str, Any]:
    shared: dict[str, Any] = {}
    for one in made:
        shared |= one.pop("$defs", {})
    return {"anyOf": made, "$defs": shared}


def _titled(kind: str, made: dict[str, Any]) -> dict[str, Any]:
    title = f"profilemate {kind}, version {VERSION}"
    return {"$schema": DIALECT, "title": title} | {
        key: value for key, value in made.items() if key not in ("title", "description")
    }


def _plain(value: Any) -> Any:
    """Without msgspec's titles and our docstrings; a number may always be null, as there is no NaN
    in JSON; an object has all of its keys, and may have more."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "number":
        return {"type": ["number", "null"]}
    kept = {
        key: _plain(each)
        for key, each in value.items()
        if key not in ("description", "default", "additionalProperties")
        and not (key == "title" and isinstance(each, str))
    }
    if isinstance(value.get("additionalProperties"), dict):
        kept["additionalProperties"] = _plain(value["additionalProperties"])
    if "properties" in kept:
        kept["properties"] = {name: _plain(one) for name, one in value["properties"].items()}
        kept["required"] = list(kept["properties"])
    return kept


def text(schema: dict[str, Any]) -> str:
    """As the file has it."""
    return json.dumps(schema, indent=1) + "\n"


def main() -> None:
    """Write all."""
    FOLDER.mkdir(exist_ok=True)
    for kind, schema in schemas().items():
        (FOLDER / f"{kind}.json").write_text(text(schema))


if __name__ == "__main__":
    main()
