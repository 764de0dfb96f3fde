// A FlowFabric worker in Go that uses only the standard library: go run worker.go
package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
)

const ttl = 30 * time.Second

type dict = map[string]any
type claim struct {
	Handle, Execution_kind string
	Payload_b64            []byte // The arguments of the call, as a JSON array.
}
type answer struct {
	Draining bool
	Results  []struct{ Status int }
	Claims   []claim
}

// The context ends when the lease is lost: another worker may have the execution.
var tasks = map[string]func(context.Context, []any) (any, error){
	"shout":  func(_ context.Context, in []any) (any, error) { return strings.ToUpper(in[0].(string)), nil },
	"refuse": func(context.Context, []any) (any, error) { return nil, fmt.Errorf("not today") },
}

func post(path string, body dict) (found answer) { // Retries; the server recognises repeats.
	for data, _ := json.Marshal(body); ; time.Sleep(time.Second) {
		request, _ := http.NewRequest("POST", os.Getenv("FF_URL")+"/v1/remote/"+path, strings.NewReader(string(data)))
		request.Header.Set("Content-Type", "application/json")
		request.Header.Set("Authorization", "Bearer "+os.Getenv("FF_API_TOKEN"))
		if reply, err := http.DefaultClient.Do(request); err == nil {
			err = json.NewDecoder(reply.Body).Decode(&found)
			if reply.Body.Close(); reply.StatusCode == 200 && err == nil {
				return found
			} else if reply.StatusCode/100 == 4 && reply.StatusCode != 429 {
				panic(path + ": " + reply.Status)
			}
		}
	}
}

func run(work claim) {
	ctx, end := context.WithCancel(context.Background())
	defer end()
	go func() {
		for time.Sleep(ttl / 3); ctx.Err() == nil; time.Sleep(ttl / 3) {
			if post("renew", dict{"items": []dict{{"handle": work.Handle}}}).Results[0].Status >= 400 {
				end()
			}
		}
	}()
	var in []any
	json.Unmarshal(work.Payload_b64, &in)
	path, item := "complete", dict{"handle": work.Handle, "result_encoding": "json"}
	result, err := tasks[work.Execution_kind](ctx, in)
	if item["result_b64"], _ = json.Marshal(result); err != nil {
		path, item = "fail", dict{"handle": work.Handle, "reason": err.Error()}
	}
	post(path, dict{"items": []dict{item}}) // With a lost lease, this changes nothing.
}

func main() {
	me, names := fmt.Sprintf("go-%d", os.Getpid()), slices.Sorted(maps.Keys(tasks))
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, os.Interrupt)
	fmt.Println("worker", me, "serves", strings.Join(names, ", "))
	for found := (answer{}); len(stop) == 0 && !found.Draining; {
		id := make([]byte, 16)
		rand.Read(id)
		uuid := fmt.Sprintf("%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
		found = post("claim?wait_ms=2000", dict{"worker_instance_id": me, "request_id": uuid,
			"tasks": names, "lease_ttl_ms": ttl.Milliseconds()})
		for _, work := range found.Claims {
			run(work)
		}
	}
	post("claim", dict{"worker_instance_id": me, "leaving": true})
}
