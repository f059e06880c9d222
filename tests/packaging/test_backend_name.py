"""The published interface is importable as `genlm.backend` under any distribution name."""

from __future__ import annotations

import json
import re
import shutil

from documents import REPOSITORY

NAME = "their-genlm-backend"


def test_another_name_is_one_setting(build, new_environment, tmp_path):
    folder = tmp_path / "backend"
    shutil.copytree(REPOSITORY / "plugins" / "genlm-backend", folder)
    project = folder / "pyproject.toml"
    text, count = re.subn(
        r'^name = "genlm-backend"$', f'name = "{NAME}"', project.read_text(), flags=re.MULTILINE
    )
    assert count == 1
    project.write_text(text)
    wheels = [build(REPOSITORY / path) for path in ("core", "plugins/genlm-hf")]
    environment = new_environment(*wheels, build(folder))
    code = (
        "import json, sys\n"
        "from importlib.metadata import packages_distributions, version\n"
        "from genlm.backend import load_model_by_name\n"
        "from genlm.backend.llm import MockAsyncLM\n"
        "llm = load_model_by_name('demo', backend='hf')\n"
        "row = llm.next_token_logprobs_sync(llm.tokenizer.encode('The '))\n"
        f"print(json.dumps([version({NAME!r}), len(row) == len(llm.str_vocab)]))"
    )
    version, fits = json.loads(environment.run_code(code).splitlines()[-1])
    assert re.search(r'^version = "(.*)"$', text, re.MULTILINE)[1] == version
    assert fits


def test_make_builds_it_under_that_name():
    makefile = (REPOSITORY / "Makefile").read_text()
    assert re.search(r"^BACKEND_NAME \?= genlm-backend$", makefile, re.MULTILINE)
    assert 's/^name = "genlm-backend"$$/name = "$(BACKEND_NAME)"/' in makefile
