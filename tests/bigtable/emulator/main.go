// Google's in-memory server of Bigtable's interface, as a program: it serves the address that is its
// argument until it is told to end. With --check, it asks the one that serves there whether it answers.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"cloud.google.com/go/bigtable/bttest"
	adminpb "google.golang.org/genproto/googleapis/bigtable/admin/v2"
	"google.golang.org/grpc"
)

const messageBytesMax = 256 << 20
const checkTime = 10 * time.Second

func main() {
	var err error
	switch {
	case len(os.Args) == 2 && os.Args[1] != "--check":
		err = serve(os.Args[1])
	case len(os.Args) == 3 && os.Args[1] == "--check":
		err = check(os.Args[2])
	default:
		fmt.Fprintln(os.Stderr, "usage: emulator [--check] HOST:PORT")
		os.Exit(2)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func serve(address string) error {
	server, err := bttest.NewServer(
		address, grpc.MaxRecvMsgSize(messageBytesMax), grpc.MaxSendMsgSize(messageBytesMax))
	if err != nil {
		return err
	}
	fmt.Println(server.Addr)
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGTERM, syscall.SIGINT)
	<-ended
	server.Close()
	return nil
}

func check(address string) error {
	ctx, cancel := context.WithTimeout(context.Background(), checkTime)
	defer cancel()
	connection, err := grpc.DialContext(ctx, address, grpc.WithInsecure())
	if err != nil {
		return err
	}
	defer connection.Close()
	// The emulator knows no instances, so any may be named.
	request := &adminpb.ListTablesRequest{Parent: "projects/check/instances/check"}
	_, err = adminpb.NewBigtableTableAdminClient(connection).ListTables(ctx, request)
	return err
}
