// A FlowFabric worker in Go (1.23 or newer) that needs no packages: go run worker.go
package main

import (
	"context"
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

type object = map[string]any
type answer struct {
	Draining bool
	Results  []object
	Claims   []struct {
		Handle, Execution_kind string
		Payload_b64            []byte // The arguments, as a JSON array.
	}
}

// The context of a task ends when its lease is lost: another worker may have the execution.
var tasks = map[string]func(context.Context, []any) (any, error){
	"shout":  func(_ context.Context, args []any) (any, error) { return strings.ToUpper(fmt.Sprint(args...)), nil },
	"refuse": func(context.Context, []any) (any, error) { return nil, fmt.Errorf("not today") },
}

func post(call string, body object) (found answer) { // Repeats until it gets a response, which is safe.
	for data, _ := json.Marshal(body); ; time.Sleep(time.Second) {
		request, _ := http.NewRequest("POST", os.Getenv("FF_URL")+"/v1/remote/"+call, strings.NewReader(string(data)))
		request.Header.Set("Content-Type", "application/json")
		request.Header.Set("Authorization", "Bearer "+os.Getenv("FF_API_TOKEN"))
		if response, err := http.DefaultClient.Do(request); err == nil {
			found = answer{}
			err = json.NewDecoder(response.Body).Decode(&found)
			again := slices.ContainsFunc(found.Results, func(row object) bool { return row["status"].(float64) >= 500 && row["retryable"] == true })
			if response.Body.Close(); response.StatusCode == 200 && err == nil && !again {
				return found
			} else if response.StatusCode/100 == 4 && response.StatusCode != 429 {
				panic(call + ": " + response.Status)
			}
		}
	}
}

func run(handle, task string, payload []byte) {
	ctx, end := context.WithCancel(context.Background())
	defer end()
	go func() {
		for time.Sleep(ttl / 3); ctx.Err() == nil; time.Sleep(ttl / 3) {
			if post("renew", object{"items": []object{{"handle": handle}}}).Results[0]["status"].(float64) >= 400 {
				end()
			}
		}
	}()
	var args []any
	json.Unmarshal(payload, &args)
	result, err := tasks[task](ctx, args)
	call, item := "complete", object{"handle": handle, "result_encoding": "json"}
	if item["result_b64"], _ = json.Marshal(result); err != nil {
		call, item = "fail", object{"handle": handle, "reason": err.Error()}
	}
	post(call, object{"items": []object{item}}) // With a lost lease, this changes nothing.
}

func main() {
	host, _ := os.Hostname()
	me, names := fmt.Sprint(host, "-", os.Getpid()), slices.Collect(maps.Keys(tasks))
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, os.Interrupt)
	fmt.Println("worker", me, "serves", names)
	for found := (answer{}); len(stop) == 0 && !found.Draining; {
		found = post("claim?wait_ms=2000", object{"worker_instance_id": me, "tasks": names,
			"lease_ttl_ms": ttl.Milliseconds(), "request_id": fmt.Sprintf("%032x", time.Now().UnixNano())})
		for _, claim := range found.Claims {
			run(claim.Handle, claim.Execution_kind, claim.Payload_b64)
		}
	}
	post("claim", object{"worker_instance_id": me, "leaving": true})
}
