"""Finding, reading and cleaning books, or explaining why a book is dropped."""
