"""Test that GitHub's files fit their schemas, name one address, and have shell steps that run."""

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from types import MappingProxyType

import pytest

import sparsync

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text())
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
}
STEPS = {
    step["name"]: step["run"]
    for workflow in WORKFLOWS.values()
    for job in workflow["jobs"].values()
    for step in job["steps"]
    if "run" in step
}
NOT_HERE = MappingProxyType(
    {
        "Let users make network namespaces, for the lab": "changes the machine's kernel settings",
        "Run everything": "runs this test",
        "Install this torch": "downloads hundreds of megabytes",
        "Test": "runs this test",
        "Test with coverage": "runs this test",
        "Install with uv and run": "downloads torch, hundreds of megabytes",
        "Build and try the wheels": "needs a container engine, or macOS",
        "Install what builds the site": "make would install into the environment of this test",
        "Install both": "downloads torch twice",
        "Compare": "its verdict depends on the machine's speed; test_gate.py tests the script",
    }
)


# ---- schemas and addresses --------------------------------------------------------------------------

SCHEMAS = [
    *(("github-workflows", f"workflows/{name}.yml") for name in WORKFLOWS),
    ("github-issue-forms", "ISSUE_TEMPLATE/bug.yml"),
    ("github-issue-forms", "ISSUE_TEMPLATE/feature.yml"),
    ("github-issue-config", "ISSUE_TEMPLATE/config.yml"),
    ("dependabot", "dependabot.yml"),
    ("citation-file-format", "../CITATION.cff"),
]


@pytest.mark.parametrize(("schema", "file"), SCHEMAS)
def test_a_file_fits_its_schema(schema, file):
    pytest.importorskip("check_jsonschema")
    words = ["-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", ".github/" + file]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def urls():
    table = (ROOT / "pyproject.toml").read_text().split("[project.urls]")[1].split("\n\n")[0]
    return dict(re.findall(r'^(\w+) = "(.*)"$', table, flags=re.MULTILINE))


def test_every_address_of_the_project_is_that_of_pyproject():
    known = urls()
    owner, name = known["Repository"].removeprefix("https://github.com/").split("/")
    ours = re.compile(r"https?://[\w.-]*(?:github\.(?:com|io))/[\w./-]*")
    files = [ROOT / "CITATION.cff", *(ROOT / ".github").rglob("*.yml"), *ROOT.glob("*.md")]
    files.append(ROOT / "examples" / "tour.ipynb")
    found = [(path.name, address) for path in files for address in ours.findall(path.read_text())]
    found = [(name, address) for name, address in found if "sparsync" in address]
    assert {path for path, _ in found} >= {"CITATION.cff", "config.yml", "tour.ipynb"}
    allowed = (known["Repository"], f"https://{owner}.github.io/{name}/")
    assert [one for one in found if not one[1].startswith(allowed)] == []
    assert known["Documentation"] == allowed[1]


def test_the_citation_has_the_papers_of_the_rooms():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["references"]
    assert [one["notes"] for one in cited] == ["Ok-Topk", "SparCML", "RedSync", "WAGMA-SGD"]
    for paper, room in zip(cited, ("oktopk", "sparcml", "redsync", "wagma"), strict=True):
        text = (ROOT / "src" / "sparsync" / "published" / room / "__init__.py").read_text()
        text = " ".join(text.split()).replace("<https://doi.org/", " ")
        assert paper.get("doi", paper.get("url")) in text
        assert paper["title"].partition(": ")[0] in text


def test_assistants_get_a_page_that_is_short_and_names_what_is_there():
    text = (ROOT / "AGENTS.md").read_text()
    assert len(text.splitlines()) <= 30
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([\w-]+)`", text):
        assert f"\n{target}:" in makefile
    for folder in re.findall(r"`([a-z/]+)/`", text):
        assert (ROOT / folder).is_dir() or (ROOT / "src" / "sparsync" / folder).is_dir(), folder


# ---- the workflows ----------------------------------------------------------------------------------


def test_every_job_has_a_deadline_and_few_permissions():
    for name, workflow in WORKFLOWS.items():
        writes = {"docs": {"contents": "write"}}
        assert workflow["permissions"] == writes.get(name, {"contents": "read"})
        assert all("timeout-minutes" in job for job in workflow["jobs"].values()), name


def test_ci_covers_the_interpreters_that_wheels_are_built_for():
    jobs = WORKFLOWS["ci"]["jobs"]
    tested = {row["python"] for row in jobs["all"]["strategy"]["matrix"]["include"]}
    assert tested == {"3.10", "3.11", "3.12", "3.13", "3.14"}
    assert 'build = "cp31{0,1,2,3,4}-*"' in (ROOT / "pyproject.toml").read_text()
    torches = {row["torch"] for row in jobs["torch"]["strategy"]["matrix"]["include"]}
    assert torches == {"2.7", "newest", "nightly"}
    systems = {job["runs-on"] for job in jobs.values()} - {"${{ matrix.os }}"}
    systems |= {row["os"] for row in jobs["all"]["strategy"]["matrix"]["include"]}
    assert systems == {"ubuntu-24.04", "ubuntu-24.04-arm", "macos-15"}


def run(folder, script, **environment):
    """Run a script as GitHub does, with the sandbox's environment first on the path."""
    path = os.pathsep.join([str(folder / ".venv/bin"), f"{sys.prefix}/bin", os.environ["PATH"]])
    files = {"GITHUB_OUTPUT": folder / "output", "GITHUB_STEP_SUMMARY": folder / "summary"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("GIT_", "GITHUB_"))}
    known = {**kept, "PATH": path, **{k: str(v) for k, v in files.items()}, **environment}
    words = ["bash", "-e", "-c", script]
    return subprocess.run(words, cwd=folder, env=known, capture_output=True, text=True)


def passes(folder, name, **environment):
    """Run a step of a workflow, and return its output."""
    done = run(folder, STEPS[name], **environment)
    assert done.returncode == 0, f"{name}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture
def checkout(tmp_path):
    """Return a clone of the working tree with a remote, and an environment that borrows this one's."""
    folder = tmp_path / "checkout"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    git = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True)
    if git.returncode:
        pytest.skip("not a checkout")
    for name in filter(lambda name: (ROOT / name).is_file(), git.stdout.splitlines()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    venv.create(folder / ".venv", symlinks=True)
    pip = folder / ".venv" / "bin" / "pip"  # a borrowed one, for this environment
    pip.write_text('#!/bin/sh\nexec python -m pip "$@"\n')
    pip.chmod(0o755)
    python = f"python3.{sys.version_info.minor}"
    here, lent = (Path("lib") / python / "site-packages", Path(sys.prefix) / "lib" / python)
    line = f"import site; site.addsitedir({str(lent / 'site-packages')!r})\n"
    (folder / ".venv" / here / "lent.pth").write_text(line)
    begin = (
        "git init --quiet --initial-branch main . && git add . && "
        "git config user.name tests && git config user.email tests@localhost && "
        "git commit --quiet --message start && git init --quiet --bare ../origin.git && "
        "git remote add origin ../origin.git && git push --quiet origin main"
    )
    begun = run(folder, begin)
    assert begun.returncode == 0, begun.stderr
    return folder


def test_every_step_is_run_here_or_there_is_a_reason():
    text = Path(__file__).read_text()
    run_here = set(re.findall(r'\n    (?:\w+ = )?passes\(\s*checkout, "([^"]+)"', text))
    run_here |= set(re.findall(r'STEPS\["([^"]+)"\]', text))
    assert not run_here & NOT_HERE.keys()
    assert run_here | NOT_HERE.keys() == STEPS.keys()
    assert all("${{" not in STEPS[name] for name in run_here)


@pytest.mark.slow
def test_the_pin_of_torch_becomes_the_installed_one(checkout):
    import torch

    file = checkout / "constraints.txt"
    file.write_text(file.read_text().replace("torch==", "torch==0.", 1))
    passes(checkout, "Pin the torch that is installed")
    assert f"\ntorch=={torch.__version__}\n" in "\n" + file.read_text()


@pytest.mark.slow
def test_a_tag_must_be_the_version_and_have_a_date(checkout):
    step = STEPS["Compare the tag with the version"]
    init = checkout / "src" / "sparsync" / "__init__.py"
    init.write_text(init.read_text().replace(f'"{sparsync.__version__}"', '"7.1.0"'))
    changes = checkout / "CHANGELOG.md"
    changes.write_text("# Changelog\n\n## [7.1.0] - unreleased\n")
    other = run(checkout, step, GITHUB_REF_NAME="v7.0.0")
    assert (other.returncode, other.stdout) == (1, "tag v7.0.0, version 7.1.0\n")
    undated = run(checkout, step, GITHUB_REF_NAME="v7.1.0")
    assert (undated.returncode, undated.stdout) == (1, "CHANGELOG.md gives 7.1.0 no date\n")
    changes.write_text("# Changelog\n\n## [7.1.0] - 2031-05-06\n")
    assert run(checkout, step, GITHUB_REF_NAME="v7.1.0").returncode == 0


@pytest.mark.slow
def test_the_last_release_is_the_highest_tag_or_else_the_merge_base(checkout):
    passes(checkout, "Find the last release")
    start = run(checkout, "git rev-parse HEAD").stdout.strip()
    assert (checkout / "output").read_text() == f"commit={start}\n"
    run(checkout, "git tag v0.9.0 && git tag v0.10.0")
    passes(checkout, "Find the last release")
    assert (checkout / "output").read_text().splitlines()[-1] == "commit=v0.10.0"


@pytest.mark.slow
def test_the_wheels_are_listed(checkout):
    passes(checkout, "Install cibuildwheel")
    listed = passes(checkout, "List the wheels").split()
    assert [name.partition("-")[0] for name in listed] == [f"cp3{minor}" for minor in range(10, 15)]
    assert not [name for name in listed if "musl" in name or "i686" in name]


@pytest.mark.slow
def test_the_sdist_is_built(checkout):
    passes(checkout, "Build the sdist")
    (sdist,) = (checkout / "dist").iterdir()
    assert sdist.name == f"sparsync-{sparsync.__version__}.tar.gz"


@pytest.mark.slow
def test_coverage_is_shown(checkout):
    pytest.importorskip("coverage")
    measured = "python -m coverage run -m sparsync --version && python -m coverage combine"
    assert run(checkout, measured).returncode == 0
    passes(checkout, "Show coverage")
    assert re.search(r"^\| +\*\*TOTAL\*\*", (checkout / "summary").read_text(), re.MULTILINE)


@pytest.mark.slow
def test_uv_resolves_for_all_systems_and_pins_no_build_of_this_machine(checkout):
    passes(checkout, "Install uv")
    passes(checkout, "Resolve for all systems")
    passes(checkout, "Show what uv sync would install")
    lock = (checkout / "uv.lock").read_text()
    assert 'name = "torch"' in lock and "+cpu" not in lock
    assert 'name = "sparsync-papers"' in lock


@pytest.mark.slow
def test_the_site_is_deployed_by_version(checkout):
    pytest.importorskip("mkdocstrings")
    passes(checkout, "Install mike")
    mkdocs = checkout / ".venv" / "bin" / "mkdocs"  # a borrowed one would not see mike
    mkdocs.write_text('#!/bin/sh\nexec python -m mkdocs "$@"\n')
    mkdocs.chmod(0o755)
    # a single page, because building all pages takes long, and `make docs` already does so with
    # warnings as errors
    (checkout / "mkdocs.yml").write_text("site_name: small\ndocs_dir: small\nplugins: [mike]\n")
    (checkout / "small").mkdir()
    (checkout / "small" / "index.md").write_text("# A page of the site\n")
    passes(checkout, "Deploy main")
    passes(checkout, "Deploy a release", GITHUB_REF_NAME="v0.1.0")
    shown = run(checkout, "git show origin/gh-pages:versions.json").stdout
    assert '"0.1"' in shown and '"dev"' in shown and '"latest"' in shown
    for version in ("0.1", "dev"):
        page = run(checkout, f"git show origin/gh-pages:{version}/index.html").stdout
        assert "A page of the site" in page


def test_the_site_links_to_the_addresses_of_pyproject():
    assert pytest.importorskip("hooks").addresses() == urls()
