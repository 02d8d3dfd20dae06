"""A folder of a run, ladder, search, data set or profile as one HTML file that needs no server and no network."""
