package main

import "context"

func runLayerPrefetch(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "layer prefetch")
	progress := progressFlag(f)
	c, args, err := f.connect(args, 1, -1, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	type prefetched struct {
		Name  string `json:"name"`
		Bytes int64  `json:"bytes"`
	}
	var all []prefetched
	for _, name := range args {
		m, err := startMeter(e, *progress)
		if err != nil {
			return err
		}
		var there int64
		err = c.PrefetchLayer(ctx, name, func(bytes, size int64) {
			there = bytes
			m.set(bytes, size)
		})
		m.stop()
		if err != nil {
			return asGiven(err, "name", "NAME")
		}
		if all = append(all, prefetched{name, there}); f.output == "json" {
			continue
		}
		if err := f.print(nil, "", [][]string{{name, "prefetched"}}); err != nil {
			return err
		}
	}
	if f.output == "json" {
		return f.print(all, "", nil)
	}
	return nil
}
