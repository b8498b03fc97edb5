package main

import (
	"context"
	"fmt"
	"time"

	"github.com/opendsec/dsec/client"
)

func runKeyCreate(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "key create")
	project := f.String("project", "", "`name` of the project that the key acts for; made if new")
	var ttl time.Duration
	f.Var(span{&ttl}, "expires-in", "how long the key is good, for example 720h; 0 is for ever")
	c, _, err := f.connect(args, 0, 0, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	var expires time.Time
	if ttl != 0 {
		expires = time.Now().Add(ttl)
	}
	k, secret, err := c.CreateKey(ctx, *project, expires)
	if err != nil {
		return err
	}
	return f.print(struct {
		client.Key
		Secret string `json:"secret"`
	}{k, secret}, "", [][]string{{secret}})
}

func runKeyList(ctx context.Context, e *env, args []string) error {
	return list(ctx, e, args, "key list", "ID PROJECT ADMIN AGE EXPIRES", (*client.Client).Keys, func(k client.Key) []string {
		expires := "never"
		if !k.Expires.IsZero() {
			expires = k.Expires.Format(time.RFC3339)
		}
		return []string{k.ID, k.Project, fmt.Sprint(k.Admin), age(k.Created), expires}
	})
}

func runKeyRevoke(ctx context.Context, e *env, args []string) error {
	return forEach(ctx, e, args, "key revoke", "revoked", nil, (*client.Client).RevokeKey)
}
