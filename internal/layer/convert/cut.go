package convert

import (
	"io"
	"maps"
	"slices"

	"github.com/opendsec/dsec"
)

// cuts is how the layers of an image become several of ours. From the lowest on, as
// many as have no more than so many bytes together are collapsed into one; the first
// that would be too much begins the next. What is below a cut so depends on nothing
// that is above it: images with the same layers at the bottom have the same of ours.
//
// How many bytes a layer has is known when it is applied. The tree as it was before
// is kept until then, and what the layer has put into the image moves to the next one
// where it turns out to be beyond a cut.
type cuts struct {
	most   int64  // bytes of tar streams that are collapsed
	images []File // for layers that are not begun

	below *inode // root of what was written; nil: nothing was
	since int    // the first layer that is not in it
	done  []Image

	bytes  int64    // of the tar streams of those from since
	last   int64    // of the one that was applied last
	placed []*inode // whose content it has put into the image
}

// beginImage makes the tree that the layers of an image are applied to.
func (c *converter) beginImage(img *image) {
	e := &c.early
	e.img, e.tree = img, newTree(c, 0)
	e.tree.keep = c.cuts.most > 0 && len(c.cuts.images) > 0
	e.findings.init()
}

// cut counts the layer that was just applied, after it ended what is below if it is
// too much for that. before is the root as it was without the layer.
func (c *converter) cut(t *tree, before *inode) error {
	s := &c.cuts
	if s.bytes > 0 && s.bytes+s.last > s.most && t.keep && len(s.images) > 0 {
		if err := c.endBelow(before); err != nil {
			return err
		}
		s.since, s.bytes = t.layer, 0
	}
	s.bytes += s.last
	return nil
}

// endBelow writes what was applied before the last layer, and begins another image.
func (c *converter) endBelow(before *inode) error {
	s, ended := &c.cuts, c.image
	c.newImage(s.images[0])
	s.images = s.images[1:]
	for _, n := range s.placed {
		if err := c.bring(n); err != nil {
			return err
		}
	}
	for _, b := range c.early.img.layers[c.early.next:] {
		if b.file != nil && b.file.image == ended {
			if err := c.spoolFile(b.file); err != nil {
				return err
			}
		}
	}
	begun := c.image
	c.image = ended
	img, err := c.writeAbove(s.below, before, Config{}) // the image's is that of the topmost
	s.below, s.done, c.image = before, append(s.done, img), begun
	return err
}

// newImage begins an image, which what is placed from now on goes to.
func (c *converter) newImage(f File) {
	c.image = newImageFile(f)
	c.images = append(c.images, c.image)
}

// writeAbove writes the image of the layer that goes on what has the root below.
func (c *converter) writeAbove(below, now *inode, cfg Config) (Image, error) {
	t, err := c.above(below, now)
	if err == nil {
		t, err = t.at(c.at)
	}
	if err != nil {
		return Image{}, err
	}
	return c.writeLayer(t, cfg)
}

// writeLayer writes the image of a layer.
func (c *converter) writeLayer(t *tree, cfg Config) (img Image, err error) {
	if err = t.finish(); err == nil {
		img.Files, img.Size, err = c.writeImage(t, identity(c.kind, cfg))
	}
	return img, err
}

// bring moves content from the image that it is in to the one that is being made.
func (c *converter) bring(n *inode) error {
	if err := n.image.sync(); err != nil {
		return err
	}
	off, err := c.image.place(io.NewSectionReader(n.image, n.off, n.size), n.size, func([]byte) {})
	n.image, n.off = c.image, off
	return err
}

// spoolFile moves content from the image that it is in to the scratch.
func (c *converter) spoolFile(n *inode) error {
	if err := n.image.sync(); err != nil {
		return err
	}
	off := c.scratch.next()
	_, err := io.CopyBuffer(struct{ io.Writer }{c.scratch}, io.NewSectionReader(n.image, n.off, n.size), make([]byte, copySize))
	n.image, n.off = nil, off
	return err
}

// keepFile sees that a file of the archive can be read.
func (c *converter) keepFile(n *inode) error {
	switch {
	case n.gone:
		return dsec.Invalid("data", "a layer of the image is used as something else")
	case n.image == nil:
		return nil
	case n.image.closed:
		return dsec.Invalid("data", "a layer or a document of the image is in the archive under another name than that of a blob")
	}
	return n.image.sync()
}

// above is the tree that shows, on what has the root below, what has the root now:
// what there is more or else, and whiteouts of what there is less. Without a root
// below it is all there is.
//
// An inode from below that got a name since is in it with all of its names: they
// would not lead to the same file if only some were.
func (c *converter) above(below, now *inode) (*tree, error) {
	t := &tree{c: c, root: now, layer: c.cuts.since}
	if below == nil {
		return t, nil
	}
	d := &difference{root: now, since: c.cuts.since}
	d.linked(below, now)
	for _, n := range d.again {
		if n.image != nil {
			if err := c.bring(n); err != nil {
				return nil, err
			}
		}
	}
	if t.root = d.dir(t, below, now); t.root == nil {
		t.root = emptied(now)
	}
	return t, nil
}

// difference is that of two roots.
type difference struct {
	root  *inode
	since int
	again []*inode // from below, which got names since
}

// linked finds inodes from below that got a name since. From then on they are not
// from below any more.
func (d *difference) linked(below, now *inode) {
	for _, name := range slices.Sorted(maps.Keys(now.children)) {
		n := now.children[name].n
		var old *inode
		if below != nil {
			old = below.children[name].n
		}
		switch {
		case n == old:
		case n.isDir():
			if old != nil && old.id != n.id {
				old = nil
			}
			d.linked(old, n)
		case n.layer < d.since:
			n.layer = d.since
			d.again = append(d.again, n)
		}
	}
}

// dir is what a directory has to have above the one that it was; nil: nothing.
func (d *difference) dir(t *tree, below, now *inode) *inode {
	x := emptied(now)
	x.opaque = d.hidesAll(t, below, now)
	for name, e := range now.children {
		old := below.children[name].n
		if x.opaque {
			old = nil
		}
		switch {
		case e.n.isDir() && old != nil && old.id == e.n.id:
			if e.n == old && len(d.again) == 0 {
				continue
			}
			if sub := d.dir(t, old, e.n); sub != nil {
				x.children[name] = dirent{sub, d.since}
			}
		case e.n.isDir() && old != nil && len(old.children) > 0 && !e.n.opaque:
			again := *e.n // made anew: what the old one had does not come back
			again.opaque = true
			x.children[name] = dirent{&again, d.since}
		case e.n != old || !e.n.isDir() && e.n.layer >= d.since:
			x.children[name] = e
		}
	}
	for name := range below.children {
		if _, ok := now.children[name]; !ok && !x.opaque {
			x.children[name] = dirent{t.newWhiteout(), d.since}
		}
	}
	if len(x.children) == 0 && !x.opaque && sameAttributes(below, now) {
		return nil
	}
	return x
}

// hidesAll reports whether a directory has nothing of what was in it, which its opaque
// mark then says; that of one that goes on other layers hides what is below those, too,
// and is there if it was asked for.
func (d *difference) hidesAll(t *tree, below, now *inode) bool {
	if t.c.upper {
		return now.opaque && !below.opaque // what is in it was made after that
	}
	for name, old := range below.children {
		n := now.children[name].n
		if n != nil && n.id == old.n.id && (n.isDir() || n == old.n && n.layer < d.since) {
			return false
		}
	}
	return len(below.children) > 0 && now != d.root
}

// emptied is a directory without what is in it.
func emptied(n *inode) *inode {
	return &inode{
		mode: n.mode, uid: n.uid, gid: n.gid, mtime: n.mtime, mtimeNs: n.mtimeNs, xattrs: n.xattrs,
		children: map[string]dirent{}, layer: n.layer, id: n.id,
	}
}

func sameAttributes(a, b *inode) bool {
	return a.mode == b.mode && a.uid == b.uid && a.gid == b.gid && a.mtime == b.mtime && a.mtimeNs == b.mtimeNs && maps.Equal(a.xattrs, b.xattrs)
}
