package lazy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"

	"golang.org/x/sys/unix"
)

func (c *Client) dial() (*connection, error) {
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: below(c.run, socketName), Net: "unixpacket"})
	if err != nil {
		return nil, err
	}
	if err := samePeer(conn); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return newConnection(conn), nil
}

// start starts a layerd that outlives this process, and returns once it listens
// or has ended.
func (c *Client) start(ctx context.Context) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	defer w.Close()
	logFile, err := c.logFile()
	if err != nil {
		return err
	}
	defer logFile.Close()
	cmd := exec.Command(c.cfg.Command[0], c.cfg.Command[1:]...)
	cmd.Dir, cmd.Env = "/", []string{}
	cmd.Stderr = logFile
	cmd.ExtraFiles = []*os.File{c.run, c.cacheDir, w} // from descriptor 3 on
	cmd.SysProcAttr = &unix.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start layerd: %w", err)
	}
	_ = w.Close()
	go func() { _ = cmd.Wait() }() // it is reaped; its socket tells of its end
	defer context.AfterFunc(ctx, func() { _ = r.Close() })()
	_, err = r.Read(make([]byte, 1)) // its end of the pipe is closed
	if err == io.EOF {
		return nil
	}
	return errors.Join(ctx.Err(), err)
}

// logFile is where layerd writes its log: it outlives us. It is kept short.
func (c *Client) logFile() (*os.File, error) {
	const most = 4 << 20
	f, err := directory{c.run}.open("layerd.log", unix.O_CREAT|unix.O_WRONLY|unix.O_APPEND)
	if err != nil {
		return nil, err
	}
	if st, err := f.Stat(); err == nil && st.Size() > most {
		if err := f.Truncate(0); err != nil {
			_ = f.Close()
			return nil, err
		}
	}
	return f, nil
}
