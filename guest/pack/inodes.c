/* Inodes of what is no directory. */
#define _GNU_SOURCE
#include <string.h>

#include "pack.h"

uint64_t put_file(struct inode *inode, const struct data *data)
{
	uint64_t head = INODE_BYTES + inode->xattr_bytes;

	inode->layout = data->layout;
	inode->value = data->value;
	inode->at = image_take_meta(head + data->table_bytes);
	image_put_inode(inode);
	image_write_meta(data->table, data->table_bytes, inode->at + head);
	return inode->at;
}

uint64_t put_symlink(struct inode *inode, const char *target)
{
	inode->size = strlen(target);
	bool fits = INODE_BYTES + inode->size <= BLOCK_BYTES;
	inode->layout = fits ? LAYOUT_INLINE : LAYOUT_PLAIN;
	inode->is_value_in_meta = !fits;
	if (!fits)
		inode->value = image_take_meta_blocks(inode->size);
	inode->at = image_take_meta(INODE_BYTES + (fits ? inode->size : 0));
	image_put_inode(inode);
	image_write_meta(target, inode->size, fits ? inode->at + INODE_BYTES : (uint64_t)inode->value << BLOCK_BITS);
	return inode->at;
}

/* Pipes, sockets, and the device 0:0 by which an overlay says that a name is gone. */
uint64_t put_special(struct inode *inode)
{
	inode->at = image_take_meta(INODE_BYTES);
	image_put_inode(inode);
	return inode->at;
}
