package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"
)

func runWebhookCreate(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "webhook create")
	filter := filterFlags(f)
	file := f.String("secret-file", "", "`file` with the secret that deliveries are signed with; default one that is made")
	c, pos, err := f.connect(args, 1, 1, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	secret := ""
	if *file != "" {
		b, err := os.ReadFile(*file)
		if err != nil {
			return ofSystem("--secret-file", err)
		}
		secret = strings.TrimSpace(string(b))
	}
	h, secret, err := c.CreateWebhook(ctx, pos[0], filter(), secret)
	if err != nil {
		return asGiven(err, "url", "URL", "secret", "--secret-file")
	}
	return f.print(map[string]any{"webhook": h, "secret": secret}, "", [][]string{{"id", h.ID}, {"secret", secret}})
}

func runWebhookList(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "webhook list")
	c, _, err := f.connect(args, 0, 0, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	all, err := c.Webhooks(ctx)
	if err != nil {
		return err
	}
	var rows [][]string
	for _, h := range all {
		rows = append(rows, []string{h.ID, h.State, fmt.Sprint(h.Delivered), h.URL})
	}
	return f.print(all, "ID STATE DELIVERED URL", rows)
}

func runWebhookGet(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "webhook get")
	c, pos, err := f.connect(args, 1, 1, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	h, err := c.Webhook(ctx, pos[0])
	if err != nil {
		return err
	}
	rows := [][]string{{"id", h.ID}, {"url", h.URL}, {"state", h.State}, {"created", h.Created.Format(time.RFC3339)}, {"delivered", fmt.Sprint(h.Delivered)}}
	if !h.LastDelivered.IsZero() {
		rows = append(rows, []string{"last", h.LastDelivered.Format(time.RFC3339)})
	}
	if h.GivenUp > 0 {
		rows = append(rows, []string{"given up", fmt.Sprint(h.GivenUp)})
	}
	if h.Error != "" {
		rows = append(rows, []string{"error", h.Error}, []string{"failing since", h.FailingSince.Format(time.RFC3339)})
	}
	return f.print(h, "", rows)
}

func runWebhookRemove(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "webhook remove")
	c, ids, err := f.connect(args, 1, -1, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	for _, id := range ids {
		if err := c.DeleteWebhook(ctx, id); err != nil {
			return asGiven(err, "id", id)
		}
	}
	return nil
}
