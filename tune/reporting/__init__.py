"""What a person reads about a search: its report and its charts."""
