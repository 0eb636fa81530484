"""The lazy reader: a process that shows layers kept in a blob store as files, through FUSE, and caches what is read."""
