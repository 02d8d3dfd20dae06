"""Infrastructure of pipeline, train and tune: command line, storage, tracking, devices. It imports none of them."""
