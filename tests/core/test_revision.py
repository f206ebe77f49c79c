"""Which revision runs: that of this project's own checkout, never that of a project it is installed into."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

import graphsafe._revision as revision


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with a copy of the module in ``package``, and the copy's ``commit``."""
    monkeypatch.delenv("GRAPHSAFE_COMMIT", raising=False)
    if shutil.which("git") is None:
        pytest.fail("git is needed: a checkout is what this is about")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    copy = tmp_path / "package" / "_revision.py"
    copy.parent.mkdir()
    shutil.copy(Path(revision.__file__), copy)
    (tmp_path / "other.txt").write_text("another project\n")
    spec = importlib.util.spec_from_file_location("copied_revision", copy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    return module.commit, git, copy


def test_no_repository_has_no_commit(checkout):
    commit, _, _ = checkout
    assert commit() is None


def test_a_package_installed_into_another_projects_checkout_has_no_commit(checkout):
    commit, git, _ = checkout
    git("init", "-q")
    git("add", "other.txt")
    git("commit", "-qm", "another project")
    assert commit() is None


def test_a_checkout_has_its_commit_and_says_where_files_differ(checkout):
    commit, git, copy = checkout
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "this project")
    assert commit() == git("rev-parse", "--short=12", "HEAD")
    copy.write_text(copy.read_text() + "\n")
    assert commit() == git("rev-parse", "--short=12", "HEAD") + "+changes"


def test_a_copy_without_history_can_be_told(checkout, monkeypatch):
    commit, _, _ = checkout
    monkeypatch.setenv("GRAPHSAFE_COMMIT", "abc123")
    assert commit() == "abc123"
