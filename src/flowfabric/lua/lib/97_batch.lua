-- Scanner calls that take many executions at once.

-- What a failed `pcall` says, as text.
function batch.why(failure)
  return tostring(type(failure) == 'table' and failure.err or failure)
end

-- One answer per id from `first` on. A record that cannot be handled answers
-- `error:<why>`: it must not undo or hide what the call does for the others.
function batch.each(ids, first, handle)
  local answers = {}
  for i = first, #ids do
    local ok, answer = pcall(handle, ids[i])
    if not ok then answer = 'error:' .. batch.why(answer) end
    answers[#answers + 1] = answer
  end
  return answers
end
