"""A ladder: what a suite of config changes gains, each measured against a control: python -m tune.ladder."""
