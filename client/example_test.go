package client_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/opendsec/dsec/client"
)

// A task is run in a sandbox of its own and graded by its exit code.
func Example() {
	ctx := context.Background()
	c, err := client.New(client.Options{}) // finds the server and the key by itself
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	sb, err := c.CreateSandbox(ctx, client.SandboxOptions{Layers: []string{"base"}, IdleTimeout: 10 * time.Minute})
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = sb.Kill(ctx) }()

	if err := sb.WriteFile(ctx, "/work/answer.py", []byte("print(6 * 7)\n"), 0o644); err != nil {
		log.Fatal(err)
	}
	cmd := sb.Command("python3", "answer.py")
	cmd.Dir, cmd.Timeout = "/work", time.Minute
	out, outcome, err := cmd.Output(ctx)
	if err != nil {
		log.Fatal(err) // the platform failed: this attempt must not be scored
	}
	fmt.Printf("%s passed: %v\n", out, outcome.OK())
}

// Output is streamed as it comes, and a session remembers.
func ExampleSession() {
	ctx := context.Background()
	c, err := client.New(client.Options{})
	if err != nil {
		log.Fatal(err)
	}
	sess, err := c.Sandbox(os.Getenv("ID")).OpenSession(ctx, client.SessionOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = sess.Close(ctx) }()
	for _, command := range []string{"cd /tmp", "export X=1", "echo $X in $PWD"} {
		if _, err := sess.Run(ctx, command, 0, os.Stdout, os.Stderr); err != nil {
			log.Fatal(err)
		}
	}
}
