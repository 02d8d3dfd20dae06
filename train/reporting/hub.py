"""Push of an exported model to the Hugging Face Hub, or to the server at HF_ENDPOINT."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.errors import UserError, first_line


def check_can_push(repo: str) -> None:
    """Raise ``UserError`` unless huggingface_hub is installed and has a token, and ``repo`` is a valid name."""
    try:
        from huggingface_hub import get_token
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id
    except ImportError as failure:
        raise UserError(
            f"--push {repo} needs the package huggingface_hub. Run 'pip install huggingface_hub', or remove --push."
        ) from failure
    try:
        validate_repo_id(repo)
    except HFValidationError as fault:
        raise UserError(f"--push {repo} is not a repository: {first_line(fault)} Use OWNER/NAME.") from fault
    if get_token() is None:
        raise UserError(f"--push {repo} needs a token of the hub. Set HF_TOKEN, or run 'hf auth login'.")


def push(folder: Path, repo: str, *, is_private: bool) -> str:
    """Upload ``folder`` as one commit to the model repository ``repo``, and return its address.

    A new repository is private if ``is_private``; the visibility of an existing one stays. Raises ``UserError`` if the
    hub does not accept the model.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    api = HfApi()
    with _errors_as_user_errors(folder, repo, api.endpoint):
        created = api.create_repo(repo, private=is_private, exist_ok=True)
        api.upload_folder(repo_id=created.repo_id, folder_path=folder, commit_message="Upload model by throughline")
    return str(created)


@contextmanager
def _errors_as_user_errors(folder: Path, repo: str, endpoint: str) -> Iterator[None]:
    """Raise ``UserError`` for an error of the hub or of the connection to it in the block."""
    try:
        yield
    except Exception as failure:  # Its HTTP client, and the client's errors, differ between versions of the library.
        raise UserError(
            f"--push {repo}: {endpoint} did not accept the model: {first_line(failure).rstrip('.')}. The model is in "
            f"{folder}. Check the name, the network and the rights of the token, then push it with 'hf upload {repo} "
            f"{folder}'."
        ) from failure
