"""What paged_biglm adds to the search: a large LM, composed with the graph on the fly [LET]."""
