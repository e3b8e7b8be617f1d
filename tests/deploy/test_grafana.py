"""The dashboard is one by Grafana's own types (`@grafana/schema`), as TypeScript's compiler finds;
its queries are tried by test_prometheus.py."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.docker_engine import CACHE
from tests.documents import ROOT

DASHBOARD = ROOT / "deploy" / "grafana" / "streamrl.json"
PACKAGES = ("@grafana/schema@13.2.3", "typescript@5.9.3")
TYPES = "./node_modules/@grafana/schema/dist/types/raw/composable"
KINDS = ("heatmap", "stat", "timeseries")
# JSON has no enumerations, and Grafana fills in what a panel leaves out.
LOOSE = """
type Text<T> = T extends string ? `${T}` : T;
type Plain<T> = T extends string | number | boolean | null | undefined ? Text<T>
  : T extends Array<infer U> ? Plain<U>[] : { [K in keyof T]: Plain<T[K]> };
type Some<T> = T extends string | number | boolean | null | undefined ? Text<T>
  : T extends Array<infer U> ? Some<U>[] : { [K in keyof T]?: Some<T[K]> };
"""
COMPILE = (
    *("--noEmit", "--strict", "--skipLibCheck", "--target", "es2022"),
    *("--module", "esnext", "--moduleResolution", "bundler"),
)


def program(dashboard: dict[str, Any]) -> str:
    files = {kind: f"{TYPES}/{kind}/panelcfg/x/types.gen" for kind in KINDS}
    lines = [f"import type * as {kind} from '{file}';" for kind, file in files.items()]
    # The query of an annotation, and how it is shown, are its data source's own.
    of_source = ("target", "titleFormat", "step")
    listed = dashboard["annotations"]["list"]
    notes = [{key: note[key] for key in note if key not in of_source} for note in listed]
    whole = json.dumps({**dashboard, "annotations": {"list": notes}})
    lines += ["import type { Dashboard } from '@grafana/schema';", LOOSE]
    lines += [f"export const dashboard: Plain<Dashboard> = {whole};"]
    for panel in dashboard["panels"]:
        if panel["type"] != "row":
            kind, title = panel["type"], panel["title"]
            own = panel["fieldConfig"]["defaults"].get("custom", {})
            for part, value in (("Options", panel["options"]), ("FieldConfig", own)):
                if value:
                    name = f"{part}{panel['id']}"
                    type_ = f"Some<{kind}.{part}>"
                    lines.append(f"export const {name}: {type_} = {json.dumps(value)}; // {title}")
    return "\n".join(lines)


def findings(dashboard: dict[str, Any]) -> str:
    """What the compiler says; packages come by npm, once."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed (apt-get install npm)")
    folder = CACHE / "grafana"
    if not (folder / "node_modules" / ".package-lock.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        install = ["npm", "install", "--silent", "--prefix", str(folder), *PACKAGES]
        done = subprocess.run(install, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"npm install: {done.stderr[-300:]}")
    file = folder / "dashboard.ts"
    file.write_text(program(dashboard))
    tsc = str(Path("node_modules") / ".bin" / "tsc")
    modules = ("--module", "esnext", "--target", "es2022")
    done = subprocess.run(
        [tsc, *COMPILE, *modules, file], cwd=folder, capture_output=True, text=True
    )
    return done.stdout


def test_the_dashboard_has_grafanas_types():
    dashboard = json.loads(DASHBOARD.read_text())
    assert {panel["type"] for panel in dashboard["panels"]} == {"row", *KINDS}
    assert findings(dashboard) == ""


def test_a_misspelled_option_of_a_panel_is_found():
    dashboard = json.loads(DASHBOARD.read_text())
    (heatmap,) = (panel for panel in dashboard["panels"] if panel["type"] == "heatmap")
    heatmap["options"]["tooltip"] = {"show": True}
    assert "'\"show\"' does not exist" in findings(dashboard)
