"""What servers say in the place of a text is told from books."""

import pytest

from pipeline.books.error_pages import find_error_message

PAGES = {
    "html": "<!DOCTYPE html><html><head><title>404 Not Found</title></head><body>" + "<p>It is not here.</p>" * 9,
    "nginx": "<html>\r\n<head><title>502 Bad Gateway</title></head>\r\n<body><h1>502</h1></body></html>",
    "gutenberg": "<!DOCTYPE html>\n<html lang='en'>\n<head>\n<title>404 | Project Gutenberg</title></head>"
    + "<p>x" * 500,
    "heading": "<html><body><h1>Access Denied</h1><p>You have no permission.</p></body></html>",
    "no code": "<html><head><title>Page not found</title></head></html>",
    "cloudflare": "<!DOCTYPE html><html><head><title>Just a moment...</title></head></html>",
    "s3": '<?xml version="1.0"?>\n<Error><Code>NoSuchKey</Code><Message>It is not here.</Message></Error>',
    "repeated": "404: Not Found\n" * 30,
    "plain": "HTTP/1.1 503 Service Unavailable\n\nNo server is available to handle this request.\n",
    "error": "Error 429: Too Many Requests\n" + "Try again later.\n" * 20,
    "moved": "<html><head><title>302 Found</title></head><body>It is elsewhere.</body></html>",
    "in brackets": "<HTML><HEAD><TITLE>Error 404 (Not Found)!!1</TITLE></HEAD><BODY></BODY></HTML>",
    "a sentence": "The requested URL /files/11/11-0.txt was not found on this server.\n" * 20,
    "json": '{"message": "Not Found", "documentation_url": "https://docs.example.org"}\n',
}
BOOKS = {
    "a title": "NOT FOUND IN THE INDEX\n\nIt began in spring, and nobody knew.\n",
    "a year": "404 A.D.\n\nThe last games were held in Rome.\n",
    "a web page": "<html><head><title>The Forbidden City</title></head><body><p>It began.</p></body></html>",
    "a chapter": "403\n\nForbidden to enter, he waited.\n",
    "a poem": "FORBIDDEN\n\nby A. Poet\n\nIt began.\n",
    "a novel": "<html><head><title>A Tale</title></head><body><h1>Chapter 404</h1><p>It began.</p></body></html>",
    "long": "404 Not Found\n\n" + "It was the number of the house.\n" * 300,
    "data": '{"text": "It began.", "message": "none"}\n' * 9,
}


@pytest.mark.parametrize("page", PAGES)
def test_an_error_page_is_recognized_by_what_it_says(page: str) -> None:
    assert find_error_message(PAGES[page].encode())


@pytest.mark.parametrize("book", BOOKS)
def test_a_text_that_only_begins_alike_is_none(book: str) -> None:
    assert find_error_message(BOOKS[book].encode()) is None
