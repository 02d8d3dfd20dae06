"""Addresses with a secret are told from those without."""

from infra.storage.credentials import has_secret


def test_a_secret_in_an_address_is_seen() -> None:
    for address in (
        "http://me:secret@mlflow.example.org:5000", "--tracking-uri=https://me:@host", "https://token@host/a.mlflow",
        "postgresql://me:secret@host/mlflow", "postgresql://host/mlflow?user=me&password=secret",
        "mysql+pymysql://host/mlflow?passwd=secret", "s3://KEY:secret@bucket/books", "s3://bucket/books?secret_key=secret",
        "https://host/book.txt?X-Amz-Signature=secret", "https://host/book.txt?se=2030&sig=secret",
        "hf://datasets/org/books?token=secret", "https://host/book.txt?X-Amz-Credential=KEY",
    ):  # fmt: skip
        assert has_secret(address), address


def test_an_address_without_one_is_not_refused() -> None:
    for address in (
        "http://127.0.0.1:5000", "https://host:8080/a@b", "sqlite:////home/me@work/mlflow.db", "postgresql://me@host/mlflow",
        "gs://anonymous@bucket/books", "s3://bucket/a:b@c", "127.0.0.1:6379", "me:secret@host", "The password: @home",
        "s3://bucket/books?endpoint_override=127.0.0.1:9000&scheme=http&region=eu", "s3://bucket/tokens?region=us-east-1",
    ):  # fmt: skip
        assert not has_secret(address), address
