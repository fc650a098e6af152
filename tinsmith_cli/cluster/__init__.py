"""A deployment of `tinsmith up` on several machines. The first machine admits the others, and sends the addresses of
all services to all machines."""
