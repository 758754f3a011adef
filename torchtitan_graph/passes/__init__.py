"""Passes: plain functions GraphModule -> GraphModule. They never import each other, and never read the job's config."""
