"""A suite of config changes, each measured against a control: python -m train.ladder."""
