"""Push an exported folder to the Hub, only if the user asks for it. The token comes from the environment."""

from __future__ import annotations

import glob
import os
import re
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils._validators import validate_repo_id

from gearbox.errors import UserError, one_line

ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
TOKEN = "HF_TOKEN"
OURS = (
    *("*.safetensors", "*.index.json", "*.gguf", "chat_template.jinja"),
    *("config.json", "adapter_config.json", "generation_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
)
"""Files of an earlier upload that would be loaded with, or in place of, those of the folder."""


def check(repository: str) -> str:
    """Return the token. Raise UserError if the id is invalid, or if no token is set."""
    try:
        validate_repo_id(repository)
        is_valid = ID.fullmatch(repository) is not None
    except HFValidationError:
        is_valid = False
    if not is_valid:
        raise UserError(f"--push: {repository[:100]!r} is not an id such as organization/name")
    token = os.environ.get(TOKEN, "")
    if not token:
        raise UserError(f"--push: no token is set; export {TOKEN} with write access to {repository}")
    return token


def push(folder: Path, repository: str, is_public: bool) -> str:
    """Create the repository unless it exists, and upload the folder in one commit. Return its address.

    A repository that exists keeps its visibility. The same commit removes the model that it had.
    """
    api = HfApi(token=check(repository))
    try:
        created = api.create_repo(repository, private=not is_public, repo_type="model", exist_ok=True)
        there = [name for name in api.list_repo_files(repository) if "/" not in name]
        older = [glob.escape(name) for name in there if any(fnmatch(name, pattern) for pattern in OURS)]
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            repo_type="model",
            commit_message=f"Upload {folder.name}",
            delete_patterns=older,  # but what the folder has too is replaced
        )
    except RepositoryNotFoundError:
        raise UserError(f"--push: {repository} is not there for this {TOKEN}; {_kept(folder)}") from None
    except HfHubHTTPError as error:
        code = error.response.status_code if error.response is not None else 0
        why = (
            f"{TOKEN} may not write to it" if code in (401, 403) else f"the Hub answers {code}: {one_line(error, 150)}"
        )
        raise UserError(f"--push: {repository}: {why}; {_kept(folder)}") from None
    except Exception as error:  # the network, in many types of error
        why = one_line(error, 150) or type(error).__name__
        raise UserError(f"--push: {repository}: the Hub cannot be reached: {why}; {_kept(folder)}") from None
    return str(created)


def _kept(folder: Path) -> str:
    return f"the export is in {folder}"
