"""Check of a family: the same step three ways, on gloo processes of this machine's CPU. See docs/extend/family.md."""
