"""Networks and the data they see. One file per source of data; NETWORKS is the table of everything a study can use."""
