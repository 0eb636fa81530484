"""The client side: native async classes in `aio`, their synchronous faces here. It speaks HTTP and imports no node."""
